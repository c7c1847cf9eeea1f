// What the parts of the kernel share: the program of one step, and where its result goes.
#pragma once
#include <cstdint>

namespace anyorder {

constexpr int BLOCK = 16;          // words, and normals, of a block of ChaCha
constexpr int TILE_BLOCKS = 128;   // blocks worked on at a time, at most: a tile is 8 KiB, and stays in the cache
constexpr int TILE = BLOCK * TILE_BLOCKS;
constexpr uint32_t EXTENSION = 1u << 31;  // in the high word of the counter of an extension block

// An operand is a tile (its number, from 0) or, below zero, an array of the stream: ~operand is its number.
constexpr int32_t NONE = INT32_MAX;

enum Kind : int32_t {
    GAUSS,   // dst = [a +] Z[row] * c
    LINEAR,  // dst = [a +] terms[0].x * terms[0].c + .. : from left to right, each product and sum rounded;
             // 0 if there is nothing
    LEAK,    // dst = a + (b + a * c)
    DIVIDE,  // dst = a / c
    WORDS,   // dst = words of the row, as bits; `count` is set in the high word of the counter
};

struct Op {
    int32_t kind, dst, a, b;
    float c;
    int32_t count;  // LINEAR: number of terms. WORDS: see there
    union {
        uint64_t row;    // GAUSS, WORDS
        uint64_t first;  // LINEAR: first term
    };
};

struct Term {
    int32_t x;
    float c;
};

enum Type : int32_t { FLOAT32, BFLOAT16, FLOAT16, FLOAT64, BITS };

struct Segment {  // a run of elements and the memory that gets their noise
    void *data;
    uint64_t element;
    uint64_t length;
};

struct Step {
    uint32_t key[8];
    int32_t rounds;
    int32_t result;           // operand that holds the noise before std
    const Op *ops;
    const Term *terms;
    float *const *arrays;     // over whole blocks; index 0 is element `origin`, a multiple of 16
    const Segment *segments;
    const int32_t *types;     // of each segment
    const uint64_t *rows;     // of each segment, in the place of the one of every GAUSS; null, or `scattered`
    uint64_t num_ops, num_tiles, num_segments, origin;
    double scale;
    float std;
    int32_t add;              // 1: segment = (segment + noise * std) * scale; 0: segment = noise * std * scale
    int32_t scattered;        // 0: the segments follow each other; 1: they lie anywhere, and no array is used
};

struct Counters {  // of the blocks of a tile
    uint32_t low[TILE_BLOCKS], high[TILE_BLOCKS];
    uint32_t row_low[TILE_BLOCKS], row_high[TILE_BLOCKS];  // where the segments have rows of their own
    void set(int i, uint64_t counter) {
        low[i] = (uint32_t)counter;
        high[i] = (uint32_t)(counter >> 32);
    }
    void set_row(int i, uint64_t row) {
        row_low[i] = (uint32_t)row;
        row_high[i] = (uint32_t)(row >> 32);
    }
};

struct Piece {  // a part of a tile on its way to a segment
    const Segment *segment;
    int32_t type;
    uint64_t skip;  // elements of the segment before it
    int from, count;
};

constexpr int STRETCH = 128;  // coordinates of a row of a table that are carried together, at most

struct Jump {  // of rows of a table: s <- Phi s + R Z[ids] + into sum, for each coordinate of a row
    uint32_t key[8];
    int32_t rounds;
    int32_t type, sums_type;  // FLOAT32 or FLOAT64
    int32_t padding;
    char *const *arrays;      // number i of row 0
    const uint64_t *strides;  // bytes from a row to the next
    const uint64_t *rows;     // distinct ones, below `table_rows`
    const uint64_t *which;    // the map of each, below `maps`
    const double *Phi, *R;    // (maps, size, size), (maps, size, normals)
    const uint64_t *ids;      // (maps, normals) rows of Z
    const void *sums;         // (rows, width), or null
    const double *into;       // (size,)
    uint64_t num_rows, size, normals, width, maps, table_rows;
    uint64_t first;           // element of Z that belongs to the first coordinate of row 0
    // Or, in the place of `which` and `ids`: rows that lack the steps last[row] .. stop - 1. The map is that of so many
    // steps, where it is known (-1: it is not), and rows of Z are those of start and stop; see `Jumps.over`.
    int32_t *last;            // of every row of the table: `stop` afterwards; null where which and ids are told
    const int64_t *map_of;    // (lengths,)
    uint64_t stop, since, steps, lengths;  // `since`: no map leads over earlier steps. `steps`: of the run, and one
    bool lacks(uint64_t row) const { return !last || (uint64_t)last[row] < stop; }
    uint64_t map_at(uint64_t place) const { return last ? (uint64_t)map_of[stop - last[rows[place]]] : which[place]; }
    uint64_t id_of(uint64_t place, uint64_t map, int l) const {
        return last ? (stop * steps + (uint64_t)last[rows[place]]) * normals + l : ids[map * normals + l];
    }
};

struct Room {  // a thread's memory for jumps
    float *tile;
    double *x;
};

}  // namespace anyorder
