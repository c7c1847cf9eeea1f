// The kernel for one instruction set. Included once for each, in a namespace of its own, with LANES defined.
//
// Every product and sum is rounded by itself (compile with -ffp-contract=off), so all instruction sets give the bits of
// the NumPy reference. `anyorder.noise` states the arithmetic.

typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef float F __attribute__((vector_size(4 * LANES)));

#if LANES == 16
#define KEEP_ORDER(v) __asm__ volatile("" : "+v"(v))
#elif defined(__x86_64__)
#define KEEP_ORDER(v) __asm__ volatile("" : "+x"(v))
#else
#define KEEP_ORDER(v) (void)v
#endif
#ifndef SIDE
#define SIDE (LANES == 16 ? 4 : 2)  // chains side by side, as many as the registers hold
#endif

INLINE F load(const float *p) { F v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, F v) { memcpy(p, &v, sizeof v); }
INLINE F splat(float c) { return c - F{}; }

#if LANES == 16
template <int N> INLINE U rotate(U v) { return (U)_mm512_rol_epi32((__m512i)v, N); }
INLINE F from_unsigned(U v) { return (F)_mm512_cvtepu32_ps((__m512i)v); }
INLINE F from_signed(I v) { return (F)_mm512_cvtepi32_ps((__m512i)v); }
INLINE F square_root(F v) { return (F)_mm512_sqrt_ps((__m512)v); }
INLINE bool any_below(U v, uint32_t limit) {
    return _mm512_cmplt_epu32_mask((__m512i)v, _mm512_set1_epi32((int)limit)) != 0;
}
INLINE U least(U v, U w) { return (U)_mm512_min_epu32((__m512i)v, (__m512i)w); }
#elif LANES == 8
template <int N> INLINE U rotate(U v) {
    if (N == 16 || N == 8) {  // by bytes: one shuffle in place of two shifts
        const __m256i order = N == 16
            ? _mm256_set_epi8(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2,
                              13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2)
            : _mm256_set_epi8(14, 13, 12, 15, 10, 9, 8, 11, 6, 5, 4, 7, 2, 1, 0, 3,
                              14, 13, 12, 15, 10, 9, 8, 11, 6, 5, 4, 7, 2, 1, 0, 3);
        return (U)_mm256_shuffle_epi8((__m256i)v, order);
    }
    return v << N | v >> (32 - N);
}
INLINE F from_signed(I v) { return (F)_mm256_cvtepi32_ps((__m256i)v); }
INLINE F from_unsigned(U v) { return from_signed((I)(v >> 16)) * 65536.0f + from_signed((I)(v & 0xFFFF)); }
INLINE F square_root(F v) { return (F)_mm256_sqrt_ps((__m256)v); }
INLINE U least(U v, U w) { return (U)_mm256_min_epu32((__m256i)v, (__m256i)w); }
INLINE bool any_below(U v, uint32_t limit) { return _mm256_movemask_epi8((__m256i)(v < limit)) != 0; }
#else
template <int N> INLINE U rotate(U v) { return v << N | v >> (32 - N); }
INLINE F from_signed(I v) { return __builtin_convertvector(v, F); }
INLINE F from_unsigned(U v) { return from_signed((I)(v >> 16)) * 65536.0f + from_signed((I)(v & 0xFFFF)); }
INLINE F square_root(F v) {
    for (int i = 0; i < LANES; ++i) v[i] = __builtin_sqrtf(v[i]);
    return v;
}
INLINE U least(U v, U w) { return v < w ? v : w; }
INLINE bool any_below(U v, uint32_t limit) {
    I below = (I)(v < limit);
    return (below[0] | below[1] | below[2] | below[3]) != 0;
}
#endif

// ---- cipher ---------------------------------------------------------------------------------------------------------

INLINE void quarter(U &a, U &b, U &c, U &d) {
    a += b; d = rotate<16>(d ^ a);
    c += d; b = rotate<12>(b ^ c);
    a += b; d = rotate<8>(d ^ a);
    c += d; b = rotate<7>(b ^ c);
}

// Word i of the blocks with these counters in x[i], a block to a lane.
INLINE void keystream(const uint32_t *key, int rounds, uint64_t row, U low, U high, U x[16]) {
    const U zero = {};
    const uint32_t head[12] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, key[0], key[1],
                               key[2], key[3], key[4], key[5], key[6], key[7]};
    for (int i = 0; i < 12; ++i) x[i] = zero + head[i];
    x[12] = low; x[13] = high;
    x[14] = zero + (uint32_t)row; x[15] = zero + (uint32_t)(row >> 32);
    for (int i = 0; i < rounds; i += 2) {
        quarter(x[0], x[4], x[8], x[12]); quarter(x[1], x[5], x[9], x[13]);
        quarter(x[2], x[6], x[10], x[14]); quarter(x[3], x[7], x[11], x[15]);
        quarter(x[0], x[5], x[10], x[15]); quarter(x[1], x[6], x[11], x[12]);
        quarter(x[2], x[7], x[8], x[13]); quarter(x[3], x[4], x[9], x[14]);
    }
    for (int i = 0; i < 12; ++i) x[i] += head[i];
    x[12] += low; x[13] += high;
    x[14] += (uint32_t)row; x[15] += (uint32_t)(row >> 32);
}

// ---- transform ------------------------------------------------------------------------------------------------------

// `EACH` steps of several independent chains stand side by side: one chain alone leaves the processor waiting.
// KEEP_ORDER holds the compiler to that order.
#define EACH for (int n = 0; n < N; ++n)

template <int N> INLINE void polynomial(F y[N], const F x[N], std::initializer_list<float> highest_first) {
    const float *c = highest_first.begin();
    EACH { y[n] = x[n] * c[0]; KEEP_ORDER(y[n]); }
    for (size_t i = 1; i + 1 < highest_first.size(); ++i) {
        EACH { y[n] = y[n] + c[i]; KEEP_ORDER(y[n]); }
        EACH { y[n] = y[n] * x[n]; KEEP_ORDER(y[n]); }
    }
    EACH { y[n] = y[n] + c[highest_first.size() - 1]; KEEP_ORDER(y[n]); }
}

// sqrt(-2 ln u) of v = 2^32 u; w the words.
template <int N> INLINE void radius(F r[N], const F v[N], const U w[N]) {
    I k[N];
    F f[N], e[N], q[N], y[N];
    EACH k[n] = (I)v[n] - 0x4F3504F3;
    EACH f[n] = (F)((k[n] & 0x7FFFFF) + 0x3F3504F3) - 1.0f;
    EACH f[n] = k[n] >= 0 ? from_signed((I)w[n]) * 0x1p-32f : f[n];  // near u = 1: u - 1, without the rounding of v
    EACH e[n] = from_signed(k[n] >> 23);
    EACH q[n] = f[n] * f[n];
    polynomial<N>(y, f, {-0.17400876f, 0.28534976f, -0.29829535f, 0.3315517f, -0.39926127f, 0.50002676f, -0.6666782f});
    EACH { y[n] = y[n] * f[n]; KEEP_ORDER(y[n]); }
    EACH { y[n] = y[n] * q[n]; KEEP_ORDER(y[n]); }
    EACH { y[n] = y[n] + e[n] * 0.00042438888f; KEEP_ORDER(y[n]); }
    EACH { y[n] = y[n] + q[n]; KEEP_ORDER(y[n]); }
    EACH { y[n] = y[n] + f[n] * -2.0f; KEEP_ORDER(y[n]); }
    EACH { y[n] = y[n] + e[n] * -1.38671875f; KEEP_ORDER(y[n]); }
    EACH { r[n] = square_root(y[n]); KEEP_ORDER(r[n]); }
}

template <int N> INLINE void circle(F cosine[N], F sine[N], const U a[N]) {
    F y[N], z[N], s[N], c[N];
    EACH y[n] = from_signed((I)(a[n] << 2)) * 0x1p-31f;
    EACH z[n] = y[n] * y[n];
    polynomial<N>(s, z, {-3.5950452e-05f, 0.002490001f, -0.080745436f, 0.7853982f});
    polynomial<N>(c, z, {-0.00031916017f, 0.015850397f, -0.3084245f, 1.0f});
    EACH s[n] = s[n] * y[n];
    EACH {
        const I odd = (I)(a[n] << 1) >> 31;  // all ones where bit 30 is set
        const F first = odd ? s[n] : c[n], second = odd ? c[n] : s[n];
        cosine[n] = (F)((U)first ^ ((a[n] ^ (a[n] << 1)) & 0x80000000u));
        sine[n] = (F)((U)second ^ (a[n] & 0x80000000u));
    }
}

// Sixteen words to sixteen normals. `further(lane, more)` gives the 16 words of a lane's extension block.
template <class Further> INLINE void normals(const U x[16], F z[16], Further further) {
    U small = x[0];
    for (int j = 1; j < 8; ++j) small = least(small, x[j]);
    const bool rare = any_below(small, 1u << 16);
    alignas(64) float value[8][LANES];
    if (__builtin_expect(rare, 0)) {
        alignas(64) uint32_t word[8][LANES];
        memcpy(word, x, sizeof word);
        for (int lane = 0; lane < LANES; ++lane) {
            uint32_t more[16];
            bool asked = false;
            for (int j = 0; j < 8; ++j) {
                value[j][lane] = (float)word[j][lane];
                if (word[j][lane] >= 1u << 16) continue;
                if (!asked) further(lane, more);
                asked = true;
                float tail = (float)more[2 * j + 1] * 0x1p-32f + (float)more[2 * j];
                tail = tail * 0x1p-32f + value[j][lane];
                value[j][lane] = tail > 0x1p-64f ? tail : 0x1p-64f;
            }
        }
    }
    for (int j = 0; j < 8; j += SIDE) {
        F v[SIDE], r[SIDE], cosine[SIDE], sine[SIDE];
        for (int i = 0; i < SIDE; ++i) v[i] = rare ? load(value[j + i]) : from_unsigned(x[j + i]);
        radius<SIDE>(r, v, x + j);
        circle<SIDE>(cosine, sine, x + 8 + j);
        for (int i = 0; i < SIDE; ++i) z[j + i] = r[i] * cosine[i];
        for (int i = 0; i < SIDE; ++i) z[8 + j + i] = r[i] * sine[i];
    }
}

// ---- from a block to a lane to memory order -------------------------------------------------------------------------

#if LANES == 16
INLINE void transpose(F z[16]) {
    __m512 *v = (__m512 *)z, w[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512 a = _mm512_unpacklo_ps(v[i], v[i + 1]), b = _mm512_unpackhi_ps(v[i], v[i + 1]);
        const __m512 c = _mm512_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm512_unpackhi_ps(v[i + 2], v[i + 3]);
        w[i] = _mm512_shuffle_ps(a, c, 0x44);
        w[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
        w[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        w[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 a = _mm512_shuffle_f32x4(w[i], w[i + 4], 0x88), b = _mm512_shuffle_f32x4(w[i], w[i + 4], 0xDD);
        const __m512 c = _mm512_shuffle_f32x4(w[i + 8], w[i + 12], 0x88);
        const __m512 d = _mm512_shuffle_f32x4(w[i + 8], w[i + 12], 0xDD);
        v[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        v[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(a, c, 0xDD);
        v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
    }
}
#elif LANES == 8
INLINE void transpose_half(__m256 *v) {
    __m256 w[8];
    for (int i = 0; i < 8; i += 4) {
        const __m256 a = _mm256_unpacklo_ps(v[i], v[i + 1]), b = _mm256_unpackhi_ps(v[i], v[i + 1]);
        const __m256 c = _mm256_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm256_unpackhi_ps(v[i + 2], v[i + 3]);
        w[i] = _mm256_shuffle_ps(a, c, 0x44);
        w[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
        w[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        w[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm256_permute2f128_ps(w[i], w[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(w[i], w[i + 4], 0x31);
    }
}
INLINE void transpose(F z[16]) {
    transpose_half((__m256 *)z);
    transpose_half((__m256 *)z + 8);
}
#else
INLINE void transpose(F z[16]) {
    for (int q = 0; q < 16; q += 4) {
        const F a = z[q], b = z[q + 1], c = z[q + 2], d = z[q + 3];
        z[q] = F{a[0], b[0], c[0], d[0]};
        z[q + 1] = F{a[1], b[1], c[1], d[1]};
        z[q + 2] = F{a[2], b[2], c[2], d[2]};
        z[q + 3] = F{a[3], b[3], c[3], d[3]};
    }
}
#endif

// Vector i of the block in a lane, after `transpose`: each group of LANES words was turned by itself.
INLINE F &part(F z[16], int lane, int i) { return z[i * LANES + lane]; }

// out[0 .. 16 count) = normals, or words, of the blocks with these counters; count is padded to whole groups of lanes.
template <bool GAUSSIAN, class Put>
INLINE void generate(const Step &step, const Op &op, const Counters &counters, int count,
                     const Ahead &ahead, Put put) {
    const uint32_t domain = GAUSSIAN ? 0 : (uint32_t)op.count;
    for (int block = 0; block < count; block += LANES) {
        if (block % 16 == 0) ahead.fetch(block * BLOCK);
        U low, high, x[16];
        memcpy(&low, counters.low + block, sizeof low);
        memcpy(&high, counters.high + block, sizeof high);
        keystream(step.key, step.rounds, op.row, low, high | domain, x);
        F z[16];
        if (GAUSSIAN)
            normals(x, z, [&](int lane, uint32_t *more) { extension(step, op.row, counters, block + lane, more); });
        else
            memcpy(z, x, sizeof z);
        transpose(z);
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 16 / LANES; ++i) put((block + lane) * BLOCK + i * LANES, part(z, lane, i));
    }
}

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

INLINE void gauss(const Step &step, const Op &op, const Counters &counters, int count, const Tile &tile,
                  const Ahead &ahead) {
    float *dst = tile[op.dst];
    if (op.kind == WORDS) return generate<false>(step, op, counters, count, ahead, [=](int i, F z) { store(dst + i, z); });
    const F c = splat(op.c);
    if (op.a != NONE) {
        const float *base = tile[op.a];
        generate<true>(step, op, counters, count, ahead, [=](int i, F z) { store(dst + i, load(base + i) + z * c); });
    } else {
        const bool plain = op.c == 1;
        generate<true>(step, op, counters, count, ahead, [=](int i, F z) { store(dst + i, plain ? z : z * c); });
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

// One tile: `blocks` blocks, rounded up to whole groups of 16, with their counters; then its pieces.
static void run_tile(const Step &step, const Tile &tile, const Counters &counters, int blocks, const Piece *pieces,
                     int num_pieces, const Ahead &ahead) {
    const Ahead none = {};
    const Ahead *next = &ahead;
    const int count = (blocks + 15) / 16 * 16;
    for (uint64_t i = 0; i < step.num_ops; ++i) {
        const Op &op = step.ops[i];
        switch (op.kind) {
            case LINEAR: linear(op, step.terms + op.first, tile, count * BLOCK); break;
            case LEAK: leak(op, tile, count * BLOCK); break;
            case DIVIDE: divide(op, tile, count * BLOCK); break;
            default:
                gauss(step, op, counters, count, tile, *next);
                next = &none;
        }
    }
    for (int i = 0; i < num_pieces; ++i) send(step, tile[step.result], pieces[i]);
}

// The transform on given words, for scans over its inputs: (16, count) words and extension words, a block to a column;
// (count, 16) normals. count is a multiple of LANES.
static void transform(const uint32_t *words, const uint32_t *further, float *out, uint64_t count) {
    for (uint64_t block = 0; block < count; block += LANES) {
        U x[16];
        F z[16];
        for (int i = 0; i < 16; ++i) memcpy(&x[i], words + i * count + block, sizeof x[i]);
        normals(x, z, [=](int lane, uint32_t *more) {
            for (int i = 0; i < 16; ++i) more[i] = further[i * count + block + lane];
        });
        transpose(z);
        for (int lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 16 / LANES; ++i) store(out + (block + lane) * BLOCK + i * LANES, part(z, lane, i));
    }
}
