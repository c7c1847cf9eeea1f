// Rows of a table carried over the steps that they have missed, for one instruction set; included after _lanes.h, in the
// same namespace. Each sum begins with 0, has one rounding for each product and each sum, in the order of the columns,
// and leaves out what has the factor 0: that changes no bit of a finite sum, which is never -0.

constexpr int DOUBLES = LANES / 2;
typedef double Wide __attribute__((vector_size(4 * LANES)));

// Coordinates of a row on their way through a tile: normal l of coordinate i is tile[from + l * step + i].
struct Stretch {
    uint64_t place, skip;  // of the row in `rows`; coordinates of the row before these
    int from, step, length;
};

// The factors that are not 0: those of number i end at ends[i].
static void choose(const Jump &jump, uint64_t map, Factor *factors, int *ends) {
    const int size = (int)jump.size, normals = (int)jump.normals;
    int count = 0;
    for (int i = 0; i < size; ++i) {
        const double *Phi = jump.Phi + (map * size + i) * size, *R = jump.R + (map * size + i) * normals;
        for (int j = 0; j < size; ++j)
            if (Phi[j] != 0) factors[count++] = {Phi[j], j};
        for (int l = 0; l < (int)jump.used[map]; ++l)
            if (R[l] != 0) factors[count++] = {R[l], size + l};
        if (jump.sums && jump.into[i] != 0) factors[count++] = {jump.into[i], size + normals};
        ends[i] = count;
    }
}

template <class T> INLINE void widen(const void *from, int length, double *x) {
    const T *p = (const T *)from;
    for (int i = 0; i < length; ++i) x[i] = (double)p[i];
}

INLINE void widen(int type, const char *from, uint64_t skip, int length, double *x) {
    type == FLOAT32 ? widen<float>(from + skip * 4, length, x) : widen<double>(from + skip * 8, length, x);
}

// x is (size + normals + 1, STRETCH): the numbers as they are, the normals, and the sum.
static void carry(const Jump &jump, const Stretch &stretch, const float *tile, const Factor *factors, const int *ends,
                  double *x) {
    const int size = (int)jump.size, length = stretch.length;
    const uint64_t row = jump.rows[stretch.place], map = jump.which[stretch.place];
    for (int j = 0; j < size; ++j)
        widen(jump.type, jump.arrays[j] + row * jump.strides[j], stretch.skip, length, x + j * STRETCH);
    for (int l = 0; l < (int)jump.used[map]; ++l)
        widen<float>(tile + stretch.from + l * stretch.step, length, x + (size + l) * STRETCH);
    if (jump.sums)
        widen(jump.sums_type, (const char *)jump.sums, stretch.place * jump.width + stretch.skip, length,
              x + (size + jump.normals) * STRETCH);
    alignas(64) double made[STRETCH];
    for (int i = 0, begin = 0; i < size; begin = ends[i++]) {
        for (int at = 0; at < length; at += 2 * DOUBLES) {
            Wide sum[2] = {};
            for (const Factor *f = factors + begin; f < factors + ends[i]; ++f) {
                Wide first, second;
                const double *from = x + f->x * STRETCH + at;
                memcpy(&first, from, sizeof first);
                memcpy(&second, from + DOUBLES, sizeof second);
                sum[0] = sum[0] + first * f->c;
                sum[1] = sum[1] + second * f->c;
            }
            memcpy(made + at, sum, sizeof sum);
        }
        char *out = jump.arrays[i] + row * jump.strides[i];
        if (jump.type == FLOAT64) {
            memcpy(out + stretch.skip * 8, made, length * sizeof(double));
            continue;
        }
        float *p = (float *)out + stretch.skip;
        for (int n = 0; n < length; ++n) p[n] = (float)made[n];
    }
}

INLINE void fetch(const Jump &jump, uint64_t row, uint64_t skip, int length) {
    const int bytes = jump.type == FLOAT32 ? 4 : 8;
    for (int j = 0; j < (int)jump.size; ++j) {
        const char *p = jump.arrays[j] + row * jump.strides[j] + skip * bytes;
        for (int at = 0; at < length * bytes; at += 64) __builtin_prefetch(p + at, 1);
    }
}

// Places first .. last of `rows`. Their normals are packed into tiles; memory is fetched while those are made.
static void run_jump(const Jump &jump, const Step &step, Room &room, uint64_t first, uint64_t last) {
    Counters counters = {};
    Stretch stretches[TILE_BLOCKS];
    int blocks = 0, count = 0;
    uint64_t chosen = UINT64_MAX;
    const Op op = {GAUSS, 0, NONE, NONE, 1.0f, 0, {0}};
    const auto flush = [&] {
        const int whole = (blocks + LANES - 1) / LANES * LANES;
        generate<true>(step, op, counters, whole * BLOCK, [&](int i, F z) { store(room.tile + i, z); });
        for (int s = 0; s < count; ++s) {
            const uint64_t map = jump.which[stretches[s].place];
            if (map != chosen) choose(jump, map, room.factors, room.ends);
            chosen = map;
            carry(jump, stretches[s], room.tile, room.factors, room.ends, room.x);
        }
        blocks = count = 0;
    };
    for (uint64_t place = first; place < last; ++place) {
        const uint64_t row = jump.rows[place], map = jump.which[place];
        const int used = (int)jump.used[map], most = used ? TILE_BLOCKS / used : TILE_BLOCKS;
        for (uint64_t skip = 0; skip < jump.width;) {
            const uint64_t element = jump.first + row * jump.width + skip;
            const int within = (int)(element % BLOCK);
            uint64_t length = (uint64_t)most * BLOCK - within;
            if (length > STRETCH) length = STRETCH;
            if (length > jump.width - skip) length = jump.width - skip;
            const int each = (int)((within + length + BLOCK - 1) / BLOCK);
            if (count == TILE_BLOCKS || blocks + each * used > TILE_BLOCKS) flush();
            fetch(jump, row, skip, (int)length);
            stretches[count++] = {place, skip, blocks * BLOCK + within, each * BLOCK, (int)length};
            for (int l = 0; l < used; ++l)
                for (int i = 0; i < each; ++i, ++blocks) {
                    counters.set(blocks, element / BLOCK + i);
                    counters.set_row(blocks, jump.ids[map * jump.normals + l]);
                }
            skip += length;
        }
    }
    flush();
}
