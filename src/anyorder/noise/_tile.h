// A program's operations on one tile, for one instruction set; included after _lanes.h, in the same namespace.

// ---- one tile -------------------------------------------------------------------------------------------------------

struct Tile {
    float *tiles;
    float *const *arrays;
    uint64_t at;  // index of the tile in the arrays
    float *operator[](int32_t operand) const {
        return operand >= 0 ? tiles + (uint64_t)operand * TILE : arrays[~operand] + at;
    }
};

static void linear(const Op &op, const Term *terms, const Tile &tile, int size) {
    float *dst = tile[op.dst];
    const float *base = op.a == NONE ? nullptr : tile[op.a], *from[MAX_TERMS];
    for (int k = 0; k < op.count; ++k) from[k] = tile[terms[k].x];
    for (int i = 0; i < size; i += 2 * BLOCK) {
        F sum[2 * BLOCK / LANES];
        int k = 0;
        if (base) {
            for (int j = 0; j < 2 * BLOCK / LANES; ++j) sum[j] = load(base + i + j * LANES);
        } else if (op.count) {
            const F c = splat(terms[0].c);
            for (int j = 0; j < 2 * BLOCK / LANES; ++j) sum[j] = load(from[0] + i + j * LANES) * c;
            k = 1;
        } else {
            for (int j = 0; j < 2 * BLOCK / LANES; ++j) sum[j] = F{};
        }
        for (; k < op.count; ++k) {
            const F c = splat(terms[k].c);
            for (int j = 0; j < 2 * BLOCK / LANES; ++j) sum[j] += load(from[k] + i + j * LANES) * c;
        }
        for (int j = 0; j < 2 * BLOCK / LANES; ++j) store(dst + i + j * LANES, sum[j]);
    }
}

static void leak(const Op &op, const Tile &tile, int size) {
    float *dst = tile[op.dst];
    const float *a = tile[op.a], *b = tile[op.b];
    const F c = splat(op.c);
    for (int i = 0; i < size; i += LANES) {
        const F x = load(a + i);
        store(dst + i, x + (load(b + i) + x * c));
    }
}

static void divide(const Op &op, const Tile &tile, int size) {
    float *dst = tile[op.dst];
    const float *a = tile[op.a];
    const F c = splat(op.c);
    for (int i = 0; i < size; i += LANES) store(dst + i, load(a + i) / c);
}

// `out`, where it is given, is float32 memory that the result is added to, times std: it goes nowhere else.
INLINE void gauss(const Step &step, const Op &op, const Counters &counters, int count, const Tile &tile,
                  const Ahead &ahead, float *out) {
    float *dst = tile[op.dst];
    if (op.kind == WORDS)
        return generate<false>(step, op, counters, count, ahead, [=](int i, F z) { store(dst + i, z); });
    const F c = splat(op.c), std = splat(step.std);
    const float *base = op.a == NONE ? nullptr : tile[op.a];
    if (base && out)
        generate<true>(step, op, counters, count, ahead,
                       [=](int i, F z) { store(out + i, load(out + i) + (load(base + i) + z * c) * std); });
    else if (base)
        generate<true>(step, op, counters, count, ahead, [=](int i, F z) { store(dst + i, load(base + i) + z * c); });
    else if (out && op.c == 1)
        generate<true>(step, op, counters, count, ahead, [=](int i, F z) { store(out + i, load(out + i) + z * std); });
    else {
        const bool plain = op.c == 1;
        generate<true>(step, op, counters, count, ahead, [=](int i, F z) { store(dst + i, plain ? z : z * c); });
        if (out)
            for (int i = 0; i < count * BLOCK; i += LANES) store(out + i, load(out + i) + load(dst + i) * std);
    }
}

// ---- a result on its way out ----------------------------------------------------------------------------------------

template <int TYPE> struct Cell;

template <> struct Cell<FLOAT32> {
    typedef float T;
    MEMBER F get(const T *p) { return load(p); }
    MEMBER void put(T *p, F v) { store(p, v); }
};

typedef uint16_t H __attribute__((vector_size(2 * LANES)));

template <> struct Cell<BFLOAT16> {
    typedef uint16_t T;
    MEMBER F get(const T *p) {
        H h;
        memcpy(&h, p, sizeof h);
        return (F)(__builtin_convertvector(h, U) << 16);
    }
    MEMBER void put(T *p, F v) {
        const U bits = (U)v, even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
        const H h = __builtin_convertvector((bits & 0x7FFFFFFF) > 0x7F800000 ? quiet : even, H);
        memcpy(p, &h, sizeof h);
    }
};

template <> struct Cell<FLOAT16> {
    typedef uint16_t T;
#if LANES == 16
    MEMBER F get(const T *p) { return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
    MEMBER void put(T *p, F v) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)v, 0)); }
#elif LANES == 8
    MEMBER F get(const T *p) { return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
    MEMBER void put(T *p, F v) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)v, 0)); }
#else
    MEMBER F get(const T *p) {
        F v;
        for (int i = 0; i < LANES; ++i) v[i] = from_half(p[i]);
        return v;
    }
    MEMBER void put(T *p, F v) {
        for (int i = 0; i < LANES; ++i) p[i] = to_half(v[i]);
    }
#endif
};

template <int TYPE> static void emit(const Step &step, const float *noise, void *out, int count) {
    typedef typename Cell<TYPE>::T T;
    const F std = splat(step.std), scale = splat((float)step.scale);
    const bool add = step.add, scaled = step.scale != 1;
    const auto one = [=](const float *z, T *p) {
        F v = load(z) * std;
        if (add) v = Cell<TYPE>::get(p) + v;
        if (scaled) v = v * scale;
        Cell<TYPE>::put(p, v);
    };
    T *p = (T *)out;
    int i = 0;
    for (; i + LANES <= count; i += LANES) one(noise + i, p + i);
    if (i == count) return;
    alignas(64) float z[LANES] = {};
    alignas(64) T rest[LANES] = {};
    memcpy(z, noise + i, (count - i) * sizeof *z);
    memcpy(rest, p + i, (count - i) * sizeof *rest);
    one(z, rest);
    memcpy(p + i, rest, (count - i) * sizeof *rest);
}

static void emit_double(const Step &step, const float *noise, double *p, int count) {
    for (int i = 0; i < count; ++i) {
        const double z = (double)(noise[i] * step.std);
        p[i] = (step.add ? p[i] + z : z) * step.scale;
    }
}

static void send(const Step &step, const float *noise, const Piece &piece) {
    char *data = (char *)piece.segment->data;
    noise += piece.from;
    switch (piece.type) {
        case FLOAT32: return emit<FLOAT32>(step, noise, data + piece.skip * 4, piece.count);
        case BFLOAT16: return emit<BFLOAT16>(step, noise, data + piece.skip * 2, piece.count);
        case FLOAT16: return emit<FLOAT16>(step, noise, data + piece.skip * 2, piece.count);
        case FLOAT64: return emit_double(step, noise, (double *)data + piece.skip, piece.count);
        case BITS: memcpy(data + piece.skip * 4, noise, (size_t)piece.count * 4);
    }
}

// Where the last operation can add its result itself: a normal that nothing else reads, all of it to float32 memory.
static float *whole_tile(const Step &step, const Piece *pieces, int num_pieces, int size) {
    if (!step.num_ops) return nullptr;
    const Op &last = step.ops[step.num_ops - 1];
    const bool plain = last.kind == GAUSS && last.dst == step.result && last.dst >= 0 && step.add && step.scale == 1;
    if (!plain || num_pieces != 1 || pieces->type != FLOAT32 || pieces->from || pieces->count != size) return nullptr;
    return (float *)pieces->segment->data + pieces->skip;
}

// One tile: `blocks` blocks, rounded up to whole groups of 16, with their counters; then its pieces.
static void run_tile(const Step &step, const Tile &tile, const Counters &counters, int blocks, const Piece *pieces,
                     int num_pieces, const Ahead &ahead) {
    const Ahead none = {};
    const Ahead *next = &ahead;
    const int count = (blocks + 15) / 16 * 16;
    float *const whole = whole_tile(step, pieces, num_pieces, count * BLOCK);
    for (uint64_t i = 0; i < step.num_ops; ++i) {
        const Op &op = step.ops[i];
        switch (op.kind) {
            case LINEAR: linear(op, step.terms + op.first, tile, count * BLOCK); break;
            case LEAK: leak(op, tile, count * BLOCK); break;
            case DIVIDE: divide(op, tile, count * BLOCK); break;
            default:
                gauss(step, op, counters, count, tile, *next, i + 1 == step.num_ops ? whole : nullptr);
                next = &none;
        }
    }
    if (whole) return;
    for (int i = 0; i < num_pieces; ++i) send(step, tile[step.result], pieces[i]);
}
