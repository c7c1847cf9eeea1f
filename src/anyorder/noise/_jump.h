// Rows of a table carried over the steps that they have missed, for one instruction set; included after _lanes.h, in the
// same namespace. Each sum begins with 0, has one rounding for each product and each sum, in the order of the columns,
// and leaves out what has the factor 0: that changes no bit of a finite sum, which is never -0.

constexpr int DOUBLES = LANES / 2;
typedef double Wide __attribute__((vector_size(4 * LANES)));

// Coordinates of a row on their way through a tile: normal l of coordinate i is tile[from + l * step + i].
struct Stretch {
    uint64_t place, skip, map;  // of the row in `rows`; coordinates of the row before these
    int from, step, length, used;
};

// Columns of R up to the last that is not 0: no further normals are made.
INLINE int used_by(const Jump &jump, uint64_t map) {
    const int size = (int)jump.size, normals = (int)jump.normals;
    const double *R = jump.R + map * size * normals;
    for (int l = normals; l; --l)
        for (int i = size; i--;)
            if (R[i * normals + l - 1] != 0) return l;
    return 0;
}

// Some coordinates of x, as double: `from` is their place, `length` how many of DOUBLES are there.
template <class T> INLINE Wide widen(const char *from, int length) {
    typedef T Narrow __attribute__((vector_size(DOUBLES * sizeof(T))));
    Narrow v = {};
    if (length == DOUBLES)
        memcpy(&v, from, sizeof v);
    else
        memcpy(&v, from, length * sizeof(T));
    return __builtin_convertvector(v, Wide);
}

INLINE Wide widen(int type, const char *from, uint64_t at, int length) {
    return type == FLOAT32 ? widen<float>(from + at * 4, length) : widen<double>(from + at * 8, length);
}

template <class T> INLINE void narrow(char *to, int length, Wide x) {
    typedef T Narrow __attribute__((vector_size(DOUBLES * sizeof(T))));
    const Narrow v = __builtin_convertvector(x, Narrow);
    if (length == DOUBLES)
        memcpy(to, &v, sizeof v);
    else
        memcpy(to, &v, length * sizeof(T));
}

// Sum += factors x, `count` of them: SIDE_BY_SIDE vectors of each x, one behind the other.
template <int SIDE_BY_SIDE> INLINE void add(Wide *sum, const double *factors, int count, const Wide *x) {
    for (int j = 0; j < count; ++j, x += SIDE_BY_SIDE) {
        const double c = factors[j];
        if (c == 0) continue;
        for (int n = 0; n < SIDE_BY_SIDE; ++n) sum[n] = sum[n] + x[n] * c;
    }
}

// Coordinates at .. of a stretch, all in SIDE_BY_SIDE vectors. x has room for the numbers as they are, the normals, and
// the sum.
template <int SIDE_BY_SIDE>
INLINE void carry(const Jump &jump, const Stretch &stretch, const float *tile, int at, Wide *x) {
    const int size = (int)jump.size, used = stretch.used;
    const uint64_t row = jump.rows[stretch.place], map = stretch.map;
    int lengths[SIDE_BY_SIDE];
    for (int n = 0, left = stretch.length - at; n < SIDE_BY_SIDE; ++n, left -= DOUBLES)
        lengths[n] = left < DOUBLES ? left : DOUBLES;
    Wide *to = x;
    for (int j = 0; j < size; ++j)
        for (int n = 0; n < SIDE_BY_SIDE; ++n)
            *to++ = widen(jump.type, jump.arrays[j] + row * jump.strides[j], stretch.skip + at + n * DOUBLES, lengths[n]);
    for (int l = 0; l < used; ++l)  // a tile has room behind its last normal
        for (int n = 0; n < SIDE_BY_SIDE; ++n)
            *to++ = widen<float>((const char *)(tile + stretch.from + l * stretch.step + at + n * DOUBLES), DOUBLES);
    if (jump.sums)
        for (int n = 0; n < SIDE_BY_SIDE; ++n)
            to[n] = widen(jump.sums_type, (const char *)jump.sums,
                          stretch.place * jump.width + stretch.skip + at + n * DOUBLES, lengths[n]);
    const double *Phi = jump.Phi + map * size * size, *R = jump.R + map * size * jump.normals;
    for (int i = 0; i < size; ++i, Phi += size, R += jump.normals) {
        Wide sum[SIDE_BY_SIDE] = {};
        add<SIDE_BY_SIDE>(sum, Phi, size, x);
        add<SIDE_BY_SIDE>(sum, R, used, x + size * SIDE_BY_SIDE);
        if (jump.sums) add<SIDE_BY_SIDE>(sum, jump.into + i, 1, to);
        char *out = jump.arrays[i] + row * jump.strides[i];
        for (int n = 0; n < SIDE_BY_SIDE; ++n) {
            const uint64_t place = stretch.skip + at + n * DOUBLES;
            if (jump.type == FLOAT32)
                narrow<float>(out + place * 4, lengths[n], sum[n]);
            else
                narrow<double>(out + place * 8, lengths[n], sum[n]);
        }
    }
}

// Every line of the cache once, that a row which begins within one ends in too.
INLINE void fetch(const Jump &jump, uint64_t row, uint64_t skip, int length) {
    const int bytes = jump.type == FLOAT32 ? 4 : 8;
    uintptr_t last = 0;
    for (int j = 0; j < (int)jump.size; ++j) {
        const uintptr_t from = (uintptr_t)(jump.arrays[j] + row * jump.strides[j] + skip * bytes);
        for (uintptr_t line = from / 64; line * 64 < from + length * bytes; ++line)
            if (line != last) __builtin_prefetch((const void *)((last = line) * 64), 1);
    }
}

// Places first .. last of `rows`. Their normals are packed into tiles; memory is fetched while those are made.
static void run_jump(const Jump &jump, const Step &step, Room &room, uint64_t first, uint64_t last) {
    Counters counters = {};
    Stretch stretches[TILE_BLOCKS];
    int blocks = 0, count = 0;
    const Op op = {GAUSS, 0, NONE, NONE, 1.0f, 0, {0}};
    const auto flush = [&] {
        const int whole = (blocks + LANES - 1) / LANES * LANES;
        generate<true>(step, op, counters, whole * BLOCK, [&](int i, F z) { store(room.tile + i, z); });
        for (const Stretch *s = stretches; s < stretches + count; ++s) {
            int at = 0;
            for (; s->length - at > DOUBLES; at += 2 * DOUBLES) carry<2>(jump, *s, room.tile, at, (Wide *)room.x);
            if (at < s->length) carry<1>(jump, *s, room.tile, at, (Wide *)room.x);
        }
        blocks = count = 0;
    };
    for (uint64_t place = first; place < last; ++place) {
        const uint64_t row = jump.rows[place];
        if (!jump.lacks(row)) continue;
        const uint64_t map = jump.map_at(place);
        const int used = used_by(jump, map);
        for (uint64_t skip = 0; skip < jump.width;) {
            const uint64_t element = jump.first + row * jump.width + skip;
            const int within = (int)(element % BLOCK);
            uint64_t length = jump.width - skip < STRETCH ? jump.width - skip : STRETCH;
            if ((within + length + BLOCK - 1) / BLOCK * used > TILE_BLOCKS) {
                const uint64_t most = (uint64_t)(TILE_BLOCKS / used) * BLOCK - within;
                length = length < most ? length : most;
            }
            const int each = (int)((within + length + BLOCK - 1) / BLOCK);
            if (count == TILE_BLOCKS || blocks + each * used > TILE_BLOCKS) flush();
            fetch(jump, row, skip, (int)length);
            stretches[count++] = {place, skip, map, blocks * BLOCK + within, each * BLOCK, (int)length, used};
            for (int l = 0; l < used; ++l)
                for (int i = 0; i < each; ++i, ++blocks) {
                    counters.set(blocks, element / BLOCK + i);
                    counters.set_row(blocks, jump.id_of(place, map, l));
                }
            skip += length;
        }
    }
    flush();
    if (jump.last)
        for (uint64_t place = first; place < last; ++place) jump.last[jump.rows[place]] = (int32_t)jump.stop;
}
