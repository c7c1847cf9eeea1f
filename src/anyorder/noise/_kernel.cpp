// Noise of one step, made and added in one pass over memory. `anyorder.noise` states the arithmetic, _kernel.h the
// program that a step is. A plain C interface, for ctypes; nothing is allocated that is not freed, nothing thrown.
//
// Compile with -O3 -ffp-contract=off: a fused multiply-add would change the bits.

#include "_kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <new>
#include <thread>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MEMBER __attribute__((always_inline)) static inline
#define INLINE MEMBER

namespace anyorder {

constexpr int MAX_TERMS = 16;  // of one LINEAR
constexpr uint64_t CHUNK = 16 * TILE;  // elements that a thread takes at a time

// ---- what every instruction set shares ------------------------------------------------------------------------------

static uint32_t turn(uint32_t v, int n) { return v << n | v >> (32 - n); }

// The extension block that belongs to a counter, one by one: one group of blocks in 512 needs it.
static __attribute__((noinline)) void extension(const Step &step, uint64_t row, const Counters &counters, int i,
                                                uint32_t *out) {
    const uint32_t row_low = step.rows ? counters.row_low[i] : (uint32_t)row;
    const uint32_t row_high = step.rows ? counters.row_high[i] : (uint32_t)(row >> 32);
    const uint32_t start[16] = {
        0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, step.key[0], step.key[1], step.key[2], step.key[3],
        step.key[4], step.key[5], step.key[6], step.key[7], counters.low[i], counters.high[i] | EXTENSION,
        row_low, row_high};
    memcpy(out, start, sizeof start);
    const auto quarter = [out](int a, int b, int c, int d) {
        out[a] += out[b]; out[d] = turn(out[d] ^ out[a], 16);
        out[c] += out[d]; out[b] = turn(out[b] ^ out[c], 12);
        out[a] += out[b]; out[d] = turn(out[d] ^ out[a], 8);
        out[c] += out[d]; out[b] = turn(out[b] ^ out[c], 7);
    };
    for (int i = 0; i < step.rounds; i += 2) {
        quarter(0, 4, 8, 12); quarter(1, 5, 9, 13); quarter(2, 6, 10, 14); quarter(3, 7, 11, 15);
        quarter(0, 5, 10, 15); quarter(1, 6, 11, 12); quarter(2, 7, 8, 13); quarter(3, 4, 9, 14);
    }
    for (int i = 0; i < 16; ++i) out[i] += start[i];
}

static float from_half(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7FFF;
    if (rest < 0x0400) return std::copysign((float)rest * 0x1p-24f, sign ? -1.0f : 1.0f);
    const uint32_t bits = sign | (rest >= 0x7C00 ? 0x7F800000 | (rest & 0x3FF) << 13 : (rest << 13) + 0x38000000);
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static uint16_t to_half(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7FFFFFFF;
    if (rest > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (rest >= 0x477FF000) return (uint16_t)(sign | 0x7C00);  // 65520 and above round to infinity
    if (rest < 0x38800000) {  // below 2^-14: a multiple of 2^-24, rounded to even by the addition
        const float sum = std::fabs(v) + 0.5f;
        uint32_t low;
        memcpy(&low, &sum, 4);
        return (uint16_t)(sign | (low - 0x3F000000));
    }
    return (uint16_t)(sign | (rest - 0x38000000 + 0xFFF + (rest >> 13 & 1)) >> 13);
}

// ---- one namespace for each instruction set -------------------------------------------------------------------------

namespace portable {
#define LANES 4
#include "_lanes.h"
#include "_tile.h"
#include "_jump.h"
#undef LANES
#undef EACH
#undef KEEP_ORDER
}  // namespace portable

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
namespace avx2 {
#define LANES 8
#include "_lanes.h"
#include "_tile.h"
#include "_jump.h"
#undef LANES
#undef EACH
#undef KEEP_ORDER
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,f16c")
#endif
namespace avx512 {
#define LANES 16
#include "_lanes.h"
#include "_tile.h"
#include "_jump.h"
#undef LANES
#undef EACH
#undef KEEP_ORDER
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

enum Lanes { PORTABLE, AVX2, AVX512 };

#if defined(__x86_64__)
// Every processor with AVX2 does; a virtual machine may hide it.
static bool converts_half_floats() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static int best_lanes() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && converts_half_floats()) return AVX2;
#endif
    return PORTABLE;
}

// ---- tiles, chunks, threads -----------------------------------------------------------------------------------------

struct Work {
    const Step *step;
    const Op *recurrence;  // the LINEAR that `leaks`, or null
    int lanes;
    uint64_t start, stop;  // elements, or segments where they are scattered
    uint64_t chunk;
    std::atomic<uint64_t> next{0};
    std::atomic<int> working{0};  // threads that had memory; one is enough for all chunks
};

static void run_tile(const Work &work, float *tiles, uint64_t at, const Counters &counters, int blocks,
                     const Piece *pieces, int num_pieces) {
    const Step &step = *work.step;
    const Op *const recurrence = work.recurrence;
#if defined(__x86_64__)
    if (work.lanes == AVX512)
        return avx512::run_tile(step, recurrence, {tiles, step.arrays, at}, counters, blocks, pieces, num_pieces);
    if (work.lanes == AVX2)
        return avx2::run_tile(step, recurrence, {tiles, step.arrays, at}, counters, blocks, pieces, num_pieces);
#endif
    portable::run_tile(step, recurrence, {tiles, step.arrays, at}, counters, blocks, pieces, num_pieces);
}

// Whether what follows a LINEAR is the LEAK of each of its terms, in their order: they can be done in one pass.
static bool leaks(const Step &step, const Op *op) {
    if (op->kind != LINEAR || !op->count || step.ops + step.num_ops - op <= op->count) return false;
    const Term *terms = step.terms + op->first;
    for (int k = 0; k < op->count; ++k) {
        const Op &next = op[k + 1];
        const int32_t x = terms[k].x;
        if (next.kind != LEAK || next.b != op->dst || next.a != x || next.dst != x) return false;
        if (op->dst == x) return false;
        for (int j = 0; j < k; ++j)
            if (terms[j].x == x) return false;
    }
    return true;
}

static const Op *recurrence_of(const Step &step) {
    for (uint64_t i = 0; i < step.num_ops; ++i)
        if (leaks(step, step.ops + i)) return step.ops + i;
    return nullptr;
}

// Elements start .. stop, which the segments cover in their order.
static void run_contiguous(const Work &work, float *tiles, uint64_t start, uint64_t stop) {
    const Step &step = *work.step;
    // Short tiles where all arrays are read and written: what waits for memory then overlaps with the next normals.
    const int tile = work.recurrence ? 16 * BLOCK : TILE;
    Counters counters;
    Piece pieces[TILE];
    uint64_t low = 0, high = step.num_segments;  // the last segment that begins at or before the first element
    const uint64_t first = start > work.start ? start : work.start;
    while (high - low > 1) {
        const uint64_t middle = (low + high) / 2;
        (step.segments[middle].element <= first ? low : high) = middle;
    }
    for (uint64_t s = low; start < stop; start += tile) {
        const uint64_t from = start > work.start ? start : work.start;
        const uint64_t to = start + tile < stop ? start + tile : stop;
        const int blocks = (int)((to - start + BLOCK - 1) / BLOCK);
        for (int i = 0; i < tile / BLOCK; ++i) counters.set(i, start / BLOCK + i);
        int count = 0;
        for (uint64_t at = from; at < to;) {
            const Segment &segment = step.segments[s];
            const uint64_t end = segment.element + segment.length, last = end < to ? end : to;
            if (last > at)
                pieces[count++] = {&segment, step.types[s], at - segment.element, (int)(at - start), (int)(last - at)};
            at = last > at ? last : at;
            if (end <= to) ++s;
        }
        run_tile(work, tiles, start - step.origin, counters, blocks, pieces, count);
    }
}

// Segments first .. last, wherever their elements lie: their blocks are packed into tiles.
static void run_scattered(const Work &work, float *tiles, uint64_t first, uint64_t last) {
    const Step &step = *work.step;
    Counters counters = {};
    Piece pieces[TILE_BLOCKS];
    int blocks = 0, count = 0;
    for (uint64_t s = first; s < last; ++s) {
        const Segment &segment = step.segments[s];
        for (uint64_t skip = 0; skip < segment.length;) {
            const uint64_t element = segment.element + skip;
            const int within = (int)(element % BLOCK);
            uint64_t length = (uint64_t)(TILE_BLOCKS - blocks) * BLOCK - within;
            if (length > segment.length - skip) length = segment.length - skip;
            const int needed = (int)((within + length + BLOCK - 1) / BLOCK);
            pieces[count++] = {&segment, step.types[s], skip, blocks * BLOCK + within, (int)length};
            for (int i = 0; i < needed; ++i) {
                counters.set(blocks + i, element / BLOCK + i);
                if (step.rows) counters.set_row(blocks + i, step.rows[s]);
            }
            blocks += needed;
            skip += length;
            if (blocks == TILE_BLOCKS) {
                run_tile(work, tiles, 0, counters, blocks, pieces, count);
                blocks = count = 0;
            }
        }
    }
    if (blocks) run_tile(work, tiles, 0, counters, blocks, pieces, count);
}

static void run_chunks(void *argument) {
    Work &work = *(Work *)argument;
    float *tiles = (float *)std::aligned_alloc(64, (work.step->num_tiles + 1) * TILE * sizeof(float));
    if (!tiles) return;
    ++work.working;
    const uint64_t base = work.step->scattered ? work.start : work.start / BLOCK * BLOCK;
    for (;;) {
        const uint64_t low = base + work.next.fetch_add(1) * work.chunk;
        if (low >= work.stop) break;
        const uint64_t high = low + work.chunk < work.stop ? low + work.chunk : work.stop;
        work.step->scattered ? run_scattered(work, tiles, low, high) : run_contiguous(work, tiles, low, high);
    }
    std::free(tiles);
}

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of an OpenMP library

static void run_parallel(void (*run)(void *), void *work, uint64_t chunks, int threads, void *parallel) {
    if ((uint64_t)threads > chunks) threads = (int)chunks;
    if (threads <= 1) return run(work);
    if (parallel) return ((Parallel)parallel)(run, work, (unsigned)threads, 0);
    std::thread *others = new (std::nothrow) std::thread[threads];
    int started = 0;
    try {
        while (others && started < threads - 1) {
            others[started] = std::thread(run, work);
            ++started;
        }
    } catch (...) {  // fewer threads, the same bits
    }
    run(work);
    for (int i = 0; i < started; ++i) others[i].join();
    delete[] others;
}

// ---- jumps of rows of a table ---------------------------------------------------------------------------------------

constexpr uint64_t ROWS = 64;  // that a thread takes at a time

struct JumpWork {
    const Jump *jump;
    Step step;  // key and rounds of the normals
    int lanes;
    std::atomic<uint64_t> next{0};
    std::atomic<int> working{0};
};

static void run_jumps(void *argument) {
    JumpWork &work = *(JumpWork *)argument;
    const Jump &jump = *work.jump;
    constexpr uint64_t VECTORS = 2 * 64;  // bytes that an instruction set carries at a time, at most
    const uint64_t tile = (TILE + BLOCK) * sizeof(float), bytes = tile + (jump.size + jump.normals + 1) * VECTORS;
    char *memory = (char *)std::aligned_alloc(64, bytes);
    if (!memory) return;
    memset(memory, 0, tile);
    ++work.working;
    Room room = {(float *)memory, (double *)(memory + tile)};
    for (;;) {
        const uint64_t first = work.next.fetch_add(1) * ROWS;
        if (first >= jump.num_rows) break;
        const uint64_t last = first + ROWS < jump.num_rows ? first + ROWS : jump.num_rows;
#if defined(__x86_64__)
        if (work.lanes == AVX512)
            avx512::run_jump(jump, work.step, room, first, last);
        else if (work.lanes == AVX2)
            avx2::run_jump(jump, work.step, room, first, last);
        else
#endif
            portable::run_jump(jump, work.step, room, first, last);
    }
    std::free(memory);
}

}  // namespace anyorder

// ---- C interface ----------------------------------------------------------------------------------------------------

extern "C" {

// Number of this interface: of the records in _kernel.h and of these functions.
int anyorder_version() { return 5; }

// The digest of the sources that this was made of; setup.py gives it.
uint64_t anyorder_sources() { return ANYORDER_SOURCES; }

// The instruction set that this machine has at best: 0 portable, 1 AVX2, 2 AVX-512.
int anyorder_lanes() { return anyorder::best_lanes(); }

// Do a step. Returns 0, or 1 where no thread had memory for its tiles: then nothing was done.
int anyorder_run(const anyorder::Step *step, int lanes, int threads, void *parallel) {
    using namespace anyorder;
    if (!step->num_segments) return 0;
    Work work;
    work.step = step;
    work.recurrence = recurrence_of(*step);
    work.lanes = lanes;
    if (step->scattered) {
        work.start = 0;
        work.stop = step->num_segments;
        work.chunk = 64;
    } else {
        const Segment &last = step->segments[step->num_segments - 1];
        work.start = step->segments[0].element;
        work.stop = last.element + last.length;
        work.chunk = CHUNK;
    }
    run_parallel(run_chunks, &work, (work.stop - work.start + work.chunk - 1) / work.chunk, threads, parallel);
    return work.working ? 0 : 1;
}

// Carry rows. Returns 0, 1 where no thread had memory, 2 where a row is not in the table or has no map, or 3 where the
// map over the steps that a row lacks is not known: nothing was done then. At most TILE_BLOCKS normals.
int anyorder_jump(const anyorder::Jump *jump, int lanes, int threads, void *parallel) {
    using namespace anyorder;
    for (uint64_t i = 0; i < jump->num_rows; ++i)
        if (jump->rows[i] >= jump->table_rows || (!jump->last && jump->which[i] >= jump->maps)) return 2;
    bool lacking = !jump->last;
    for (uint64_t i = 0; jump->last && i < jump->num_rows; ++i) {
        const uint64_t start = (uint64_t)jump->last[jump->rows[i]], length = jump->stop - start;
        if (start >= jump->stop) continue;
        if (start < jump->since || length >= jump->lengths || (uint64_t)jump->map_of[length] >= jump->maps) return 3;
        lacking = true;
    }
    if (!lacking) return 0;
    if (!jump->num_rows || !jump->width) return 0;
    JumpWork work;
    work.jump = jump;
    work.step = {};
    memcpy(work.step.key, jump->key, sizeof jump->key);
    work.step.rounds = jump->rounds;
    work.step.rows = jump->rows;  // not null: rows of Z are those of the counters
    work.lanes = lanes;
    run_parallel(run_jumps, &work, (jump->num_rows + ROWS - 1) / ROWS, threads, parallel);
    return work.working ? 0 : 1;
}

// The transform on given words: see `transform` in _lanes.h. count is a multiple of 16.
void anyorder_transform(int lanes, const uint32_t *words, const uint32_t *further, float *out, uint64_t count) {
    using namespace anyorder;
#if defined(__x86_64__)
    if (lanes == AVX512) return avx512::transform(words, further, out, count);
    if (lanes == AVX2) return avx2::transform(words, further, out, count);
#endif
    portable::transform(words, further, out, count);
}

}  // extern "C"
