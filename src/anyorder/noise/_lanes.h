// The kernel for one instruction set. Included once for each, in a namespace of its own, with LANES defined.
//
// Every product and sum is rounded by itself (compile with -ffp-contract=off), so all instruction sets give the bits of
// the NumPy reference. `anyorder.noise` states the arithmetic. A program's operations on these vectors are in _tile.h.

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
#define SIDE (LANES == 16 ? 4 : 2)
#endif
INLINE F load(const float *p) { F v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *p, F v) { memcpy(p, &v, sizeof v); }
INLINE F splat(float c) { return c - F{}; }

#if LANES == 16
template <int N> INLINE U rotate(U v) { return (U)_mm512_rol_epi32((__m512i)v, N); }
INLINE F from_unsigned(U v) { return (F)_mm512_cvtepu32_ps((__m512i)v); }
INLINE F from_signed(I v) { return (F)_mm512_cvtepi32_ps((__m512i)v); }
INLINE F square_root(F v) { return (F)_mm512_sqrt_ps((__m512)v); }
// a b + c where a b is exact: then the one rounding of a fused operation is that of the sum, and the bits are the same.
INLINE F add_exact(F a, float b, F c) { return (F)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)c); }
constexpr int ONE = 0x3F800000;  // what `radius` has in k for exponent 0: here the bits of 1, so that k is a float
INLINE F exponent(I k) { return (F)_mm512_getexp_ps((__m512)k); }
// other * factor where k has exponent 0, else f.
INLINE F replace_above(F f, I k, F other, float factor) {
    const __mmask16 above = _mm512_cmpge_epi32_mask((__m512i)k, _mm512_set1_epi32(ONE));
    return (F)_mm512_mask_mul_ps((__m512)f, above, (__m512)other, _mm512_set1_ps(factor));
}
// v with its sign bit flipped by bit 31 of a.
INLINE F flip(F v, U a) {
    return (F)_mm512_ternarylogic_epi32((__m512i)v, (__m512i)a, _mm512_set1_epi32((int)0x80000000u), 0x78);
}
// (c, s) = (-s, c) where bit 30 of a is set.
INLINE void quarter_turn(F &c, F &s, U a) {
    const __mmask16 odd = _mm512_test_epi32_mask((__m512i)a, _mm512_set1_epi32(1 << 30));
    const __m512 first = _mm512_mask_xor_ps((__m512)c, odd, (__m512)s, _mm512_set1_ps(-0.0f));
    s = (F)_mm512_mask_mov_ps((__m512)s, odd, (__m512)c);
    c = (F)first;
}
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

#if LANES != 16
INLINE F add_exact(F a, float b, F c) { return c + a * b; }
constexpr int ONE = 0;
INLINE F exponent(I k) { return from_signed(k >> 23); }
INLINE F replace_above(F f, I k, F other, float factor) { return k >= ONE ? other * factor : f; }
INLINE F flip(F v, U a) { return (F)((U)v ^ (a & 0x80000000u)); }
INLINE void quarter_turn(F &c, F &s, U a) {
    const I odd = (I)(a << 1) >> 31;
    const F first = odd ? (F)((U)s ^ 0x80000000u) : c;
    s = odd ? c : s;
    c = first;
}
#endif

// ---- cipher ---------------------------------------------------------------------------------------------------------

INLINE void quarter(U &a, U &b, U &c, U &d) {
    a += b; d = rotate<16>(d ^ a);
    c += d; b = rotate<12>(b ^ c);
    a += b; d = rotate<8>(d ^ a);
    c += d; b = rotate<7>(b ^ c);
}

// Word i of the blocks with these rows and counters in x[i], a block to a lane.
INLINE void keystream(const uint32_t *key, int rounds, U row_low, U row_high, U low, U high, U x[16]) {
    const U zero = {};
    const uint32_t head[12] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, key[0], key[1],
                               key[2], key[3], key[4], key[5], key[6], key[7]};
    for (int i = 0; i < 12; ++i) x[i] = zero + head[i];
    x[12] = low; x[13] = high;
    x[14] = row_low; x[15] = row_high;
    for (int i = 0; i < rounds; i += 2) {
        quarter(x[0], x[4], x[8], x[12]); quarter(x[1], x[5], x[9], x[13]);
        quarter(x[2], x[6], x[10], x[14]); quarter(x[3], x[7], x[11], x[15]);
        quarter(x[0], x[5], x[10], x[15]); quarter(x[1], x[6], x[11], x[12]);
        quarter(x[2], x[7], x[8], x[13]); quarter(x[3], x[4], x[9], x[14]);
    }
    for (int i = 0; i < 12; ++i) x[i] += head[i];
    x[12] += low; x[13] += high;
    x[14] += row_low; x[15] += row_high;
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
    EACH k[n] = (I)v[n] - (0x4F3504F3 - ONE);
    EACH f[n] = (F)((k[n] & 0x7FFFFF) + 0x3F3504F3) - 1.0f;
    EACH f[n] = replace_above(f[n], k[n], from_signed((I)w[n]), 0x1p-32f);  // u - 1, unrounded
    EACH e[n] = exponent(k[n]);
    EACH q[n] = f[n] * f[n];
    polynomial<N>(y, f, {-0.17400876f, 0.28534976f, -0.29829535f, 0.3315517f, -0.39926127f, 0.50002676f, -0.6666782f});
    EACH { y[n] = y[n] * f[n]; KEEP_ORDER(y[n]); }
    EACH { y[n] = y[n] * q[n]; KEEP_ORDER(y[n]); }
    EACH { y[n] = y[n] + e[n] * 0.00042438888f; KEEP_ORDER(y[n]); }
    EACH { y[n] = y[n] + q[n]; KEEP_ORDER(y[n]); }
    EACH { y[n] = add_exact(f[n], -2.0f, y[n]); KEEP_ORDER(y[n]); }
    EACH { y[n] = add_exact(e[n], -1.38671875f, y[n]); KEEP_ORDER(y[n]); }
    EACH { r[n] = square_root(y[n]); KEEP_ORDER(r[n]); }
}

template <int N> INLINE void circle(F cosine[N], F sine[N], const U a[N]) {
    F y[N], z[N];
    EACH y[n] = from_signed((I)(a[n] << 2)) * 0x1p-31f;
    EACH z[n] = y[n] * y[n];
    polynomial<N>(sine, z, {-3.5950452e-05f, 0.002490001f, -0.080745436f, 0.7853982f});
    polynomial<N>(cosine, z, {-0.00031916017f, 0.015850397f, -0.3084245f, 1.0f});
    EACH sine[n] = sine[n] * y[n];
    EACH quarter_turn(cosine[n], sine[n], a[n]);
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
        for (int i = 0; i < SIDE; ++i) r[i] = flip(r[i], x[8 + j + i]);  // half a turn
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

// The normals, or words, of the blocks with these counters, `size` of them in whole groups of lanes, to `put` in order.
template <bool GAUSSIAN, class Put>
INLINE void generate(const Step &step, const Op &op, const Counters &counters, int size, Put put) {
    const uint32_t domain = GAUSSIAN ? 0 : (uint32_t)op.count;
    U row_low = U{} + (uint32_t)op.row, row_high = U{} + (uint32_t)(op.row >> 32);
    for (int block = 0; block < size / BLOCK; block += LANES) {
        U low, high, x[16];
        memcpy(&low, counters.low + block, sizeof low);
        memcpy(&high, counters.high + block, sizeof high);
        if (step.rows) {
            memcpy(&row_low, counters.row_low + block, sizeof row_low);
            memcpy(&row_high, counters.row_high + block, sizeof row_high);
        }
        keystream(step.key, step.rounds, row_low, row_high, low, high | domain, x);
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
