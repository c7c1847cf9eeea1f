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

// A step's last operation may add its result, times std, to float32 memory at once: `out`, null for the others.
INLINE void finish(const Step &step, float *out, F v) {
    const F sum = load(out) + v * splat(step.std);
    store(out, step.scale == 1 ? sum : sum * splat((float)step.scale));
}

// LINEAR of COUNT terms and, where it LEAKS, the LEAK of each of them that follows it: every array is read once. It is
// unrolled: from a load of its own for each array the processor sees all streams, and fetches them ahead.
template <int COUNT, bool LEAKS>
static void linear_of(const Step &step, const Op *op, const Tile &tile, int size, float *out) {
    constexpr int SIDE_BY_SIDE = LEAKS ? 1 : 2 * BLOCK / LANES;
    const Term *terms = step.terms + op->first;
    const float *base = op->a == NONE ? nullptr : tile[op->a];
    float *dst = tile[op->dst], *x[COUNT];
    F c[COUNT], loss[COUNT];
    for (int k = 0; k < COUNT; ++k) {
        x[k] = tile[terms[k].x];
        c[k] = splat(terms[k].c);
        if (LEAKS) loss[k] = splat(op[k + 1].c);
    }
    for (int i = 0; i < size; i += SIDE_BY_SIDE * LANES) {
        F sum[SIDE_BY_SIDE], old[COUNT];
#pragma GCC unroll 16
        for (int k = 0; k < COUNT; ++k)
            for (int j = 0; j < SIDE_BY_SIDE; ++j) {
                const int at = i + j * LANES;
                old[k] = load(x[k] + at);
                sum[j] = k ? sum[j] + old[k] * c[k] : base ? load(base + at) + old[k] * c[k] : old[k] * c[k];
            }
#pragma GCC unroll 16
        for (int k = 0; k < COUNT && LEAKS; ++k) store(x[k] + i, old[k] + (sum[0] + old[k] * loss[k]));
        for (int j = 0; j < SIDE_BY_SIDE; ++j) {
            store(dst + i + j * LANES, sum[j]);
            if (out) finish(step, out + i + j * LANES, sum[j]);
        }
    }
}

template <bool LEAKS, int... K>
static void linear(const Step &step, const Op *op, const Tile &tile, int size, float *out,
                   std::integer_sequence<int, K...>) {
    static constexpr void (*of[])(const Step &, const Op *, const Tile &, int, float *) = {
        linear_of<K + 1, LEAKS>...};
    of[op->count - 1](step, op, tile, size, out);
}

static void linear(const Step &step, const Op *op, bool leaks, const Tile &tile, int size, float *out) {
    constexpr std::make_integer_sequence<int, MAX_TERMS> counts = {};
    if (op->count) return leaks ? linear<true>(step, op, tile, size, out, counts)
                                : linear<false>(step, op, tile, size, out, counts);
    float *dst = tile[op->dst];
    for (int i = 0; i < size; i += LANES) {
        const F v = op->a == NONE ? F{} : load(tile[op->a] + i);
        store(dst + i, v);
        if (out) finish(step, out + i, v);
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

static void divide(const Step &step, const Op &op, const Tile &tile, int size, float *out) {
    float *dst = tile[op.dst];
    const float *a = tile[op.a];
    const F c = splat(op.c);
    for (int i = 0; i < size; i += LANES) {
        const F v = load(a + i) / c;
        store(dst + i, v);
        if (out) finish(step, out + i, v);
    }
}

INLINE void gauss(const Step &step, const Op &op, const Counters &counters, const Tile &tile, int size, float *out) {
    float *dst = tile[op.dst];
    if (op.kind == WORDS)
        return generate<false>(step, op, counters, size, [=](int i, F z) { store(dst + i, z); });
    const F c = splat(op.c), std = splat(step.std);
    const float *base = op.a == NONE ? nullptr : tile[op.a];
    const bool plain = op.c == 1, direct = out && op.dst >= 0 && (base || plain);  // a last tile is not read again
    if (direct && base)
        generate<true>(step, op, counters, size,
                       [=](int i, F z) { store(out + i, load(out + i) + (load(base + i) + z * c) * std); });
    else if (direct)
        generate<true>(step, op, counters, size, [=](int i, F z) { store(out + i, load(out + i) + z * std); });
    else if (base)
        generate<true>(step, op, counters, size, [=](int i, F z) { store(dst + i, load(base + i) + z * c); });
    else
        generate<true>(step, op, counters, size, [=](int i, F z) { store(dst + i, plain ? z : z * c); });
    if (out && !direct)
        for (int i = 0; i < size; i += LANES) finish(step, out + i, load(dst + i));
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

// The memory that the last operation can add its result to: float32, and all of the tile.
static float *whole_tile(const Step &step, const Piece *pieces, int num_pieces, int size) {
    if (!step.num_ops || !step.add || num_pieces != 1) return nullptr;
    if (pieces->type != FLOAT32 || pieces->from || pieces->count != size) return nullptr;
    const Op &last = step.ops[step.num_ops - 1];
    if (last.dst != step.result || last.kind == LEAK || last.kind == WORDS) return nullptr;
    if (last.kind == GAUSS && step.scale != 1) return nullptr;  // a further product among the normals costs more
    return (float *)pieces->segment->data + pieces->skip;
}

// One tile: `blocks` blocks, rounded up to whole groups of 16, with their counters; then its pieces.
static void run_tile(const Step &step, const Op *recurrence, const Tile &tile, const Counters &counters, int blocks,
                     const Piece *pieces, int num_pieces) {
    const int size = (blocks + 15) / 16 * 16 * BLOCK;
    const Op *const end = step.ops + step.num_ops;
    float *const whole = whole_tile(step, pieces, num_pieces, size);
    for (const Op *op = step.ops; op < end; ++op) {
        float *const out = op + 1 == end ? whole : nullptr;
        switch (op->kind) {
            case LINEAR: linear(step, op, op == recurrence, tile, size, out); break;
            case LEAK: leak(*op, tile, size); break;
            case DIVIDE: divide(step, *op, tile, size, out); break;
            default: gauss(step, *op, counters, tile, size, out);
        }
        if (op == recurrence) op += op->count;
    }
    if (whole) return;
    for (int i = 0; i < num_pieces; ++i) send(step, tile[step.result], pieces[i]);
}
