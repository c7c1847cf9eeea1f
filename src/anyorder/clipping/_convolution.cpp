// The gradient of a convolution's weight for each example, without unfolding the inputs, and squared norms. A plain C
// interface, for ctypes; nothing is allocated that is not freed, nothing thrown.

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace anyorder {

// What is asked for. Every field has 8 bytes; strides count floats. `native` fills it.
struct Job {
    const float *x;   // (batch, channels, height, width)
    const float *g;   // (batch, out_channels, out_height, out_width), the gradients of the outputs
    float *out;       // (batch, kernel_h, kernel_w, channels, out_channels)
    double *squares;  // (batch,)
    int64_t batch, channels, height, width, out_channels, out_height, out_width;
    int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h;
    int64_t x_strides[4], g_strides[4];
};

// One example, channels last: (padded height, padded width, channels) and (out_height, out_width, out_channels).
struct Image {
    const float *x, *g;
    int64_t x_row, g_pixel;  // from a row of x to the next, from a position of g to the next
};

// One use of a parameter by a batch, an example a row. Every field has 8 bytes; strides count floats from row to row.
struct Layer {
    const float *a;   // (batch, inputs): the gradient of example b is g_b (x) a_b; null: it is g_b itself
    const float *g;   // (batch, outputs)
    float *out;       // (outputs, inputs), or (outputs,); null: somebody else adds this one up
    int64_t inputs, outputs, a_stride, g_stride;
};

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define LANES 8
#define TAPS 6
#include "_convolution.h"
#undef LANES
#undef TAPS
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
#define LANES 16
#define TAPS 8
#include "_convolution.h"
#undef LANES
#undef TAPS
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace portable {
#define LANES 4
#define TAPS 4
#include "_convolution.h"
#undef LANES
#undef TAPS
}  // namespace portable

enum { PORTABLE, AVX2, AVX512 };
constexpr int64_t WIDTH[] = {4, 8, 16};  // floats in a vector

static void gradient(int lanes, const Job &job, const Image &image, float *out) {
#if defined(__x86_64__)
    if (lanes == AVX512) return avx512::gradient(job, image, out);
    if (lanes == AVX2) return avx2::gradient(job, image, out);
#endif
    portable::gradient(job, image, out);
}

static double square(int lanes, const float *v, int64_t size) {
#if defined(__x86_64__)
    if (lanes == AVX512) return avx512::square(v, size);
    if (lanes == AVX2) return avx2::square(v, size);
#endif
    return portable::square(v, size);
}

static void total(int lanes, const Layer &layer, const float *weights, const int64_t *examples, int64_t count) {
#define ANYORDER_TOTAL(path) \
    return layer.a ? path::outer_sum(layer, weights, examples, count) : path::rows_sum(layer, weights, examples, count)
#if defined(__x86_64__)
    if (lanes == AVX512) ANYORDER_TOTAL(avx512);
    if (lanes == AVX2) ANYORDER_TOTAL(avx2);
#endif
    ANYORDER_TOTAL(portable);
#undef ANYORDER_TOTAL
}

static float greatest(int lanes, const float *v, int64_t size) {
#if defined(__x86_64__)
    if (lanes == AVX512) return avx512::greatest(v, size);
    if (lanes == AVX2) return avx2::greatest(v, size);
#endif
    return portable::greatest(v, size);
}

struct Work {
    const Job *job;
    int lanes;
    int64_t x_row, g_pixel;
    int64_t x_size, g_size;  // floats of an example's copy; 0 where its own memory will do
    std::atomic<int64_t> next{0};
};

// Four runs of four floats, `from` apart, into four with the other order, `to` apart.
static inline void turn(const float *in, int64_t from, float *out, int64_t to) {
#if defined(__x86_64__)
    __m128 a = _mm_loadu_ps(in), b = _mm_loadu_ps(in + from);
    __m128 c = _mm_loadu_ps(in + 2 * from), d = _mm_loadu_ps(in + 3 * from);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, a);
    _mm_storeu_ps(out + to, b);
    _mm_storeu_ps(out + 2 * to, c);
    _mm_storeu_ps(out + 3 * to, d);
#else
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 4; ++j) out[j * to + i] = in[i * from + j];
#endif
}

// An image into rows of `row` floats and positions of `pixel` floats.
static void copy(const float *from, const int64_t *strides, int64_t channels, int64_t height, int64_t width, float *to,
                 int64_t row, int64_t pixel) {
    const int64_t channel = strides[1], column = strides[3];
    for (int64_t h = 0; h < height; ++h, from += strides[2], to += row) {
        // Whole blocks of 4 x 4 where a row is one run of memory, and what is left one by one.
        const int64_t blocks = column == 1 && channel != 1 ? width / 4 * 4 : 0, many = blocks ? channels / 4 * 4 : 0;
        for (int64_t c = 0; c < many; c += 4)
            for (int64_t w = 0; w < blocks; w += 4) turn(from + c * channel + w, channel, to + w * pixel + c, pixel);
        for (int64_t w = 0; w < width; ++w)
            for (int64_t c = w < blocks ? many : 0; c < channels; ++c)
                to[w * pixel + c] = from[c * channel + w * column];
    }
}

static void run_examples(void *given) {
    Work &work = *(Work *)given;
    const Job &job = *work.job;
    const int64_t size = job.kernel_h * job.kernel_w * job.channels * job.out_channels;
    // The padding stays zero: a copy writes what is inside.
    float *space = (float *)std::calloc(work.x_size + work.g_size + 1, sizeof(float));
    if (!space) return;
    for (int64_t i; (i = work.next.fetch_add(1)) < job.batch;) {
        Image image = {job.x + i * job.x_strides[0], job.g + i * job.g_strides[0], work.x_row, work.g_pixel};
        if (work.x_size) {
            float *inside = space + job.padding_h * work.x_row + job.padding_w * job.channels;
            copy(image.x, job.x_strides, job.channels, job.height, job.width, inside, work.x_row, job.channels);
            image.x = space;
        }
        if (work.g_size) {
            float *back = space + work.x_size;
            copy(image.g, job.g_strides, job.out_channels, job.out_height, job.out_width, back,
                 job.out_width * work.g_pixel, work.g_pixel);
            image.g = back;
        }
        float *out = job.out + i * size;
        gradient(work.lanes, job, image, out);
        job.squares[i] = square(work.lanes, out, size);
    }
    std::free(space);
}

constexpr int64_t SMALL = 1 << 15;  // numbers that one thread squares before another would have begun

struct Rows {
    const float *rows;
    double *squares;
    int64_t count, size, stride;
    int lanes;
    std::atomic<int64_t> next{0};
};

static void run_rows(void *given) {
    Rows &work = *(Rows *)given;
    const int64_t many = 1 + SMALL / 8 / (work.size + 1);
    for (int64_t start; (start = work.next.fetch_add(many)) < work.count;)
        for (int64_t i = start; i < start + many && i < work.count; ++i)
            work.squares[i] = square(work.lanes, work.rows + i * work.stride, work.size);
}

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel of an OpenMP library

static void run_parallel(void (*run)(void *), void *work, int64_t threads, void *parallel) {
    if (threads <= 1) return run(work);
    if (parallel) return ((Parallel)parallel)(run, work, (unsigned)threads, 0);
    std::thread *others = new (std::nothrow) std::thread[threads];
    int started = 0;
    try {
        for (; others && started < threads - 1; ++started) others[started] = std::thread(run, work);
    } catch (...) {  // fewer threads
    }
    run(work);
    for (int i = 0; i < started; ++i) others[i].join();
    delete[] others;
}

}  // namespace anyorder

extern "C" {

// The digest of the sources that this was made of; setup.py gives it.
uint64_t anyorder_sources() { return ANYORDER_SOURCES; }

// The instruction set that this machine has at best: 0 portable, 1 AVX2, 2 AVX-512.
int anyorder_lanes() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return anyorder::AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return anyorder::AVX2;
#endif
    return anyorder::PORTABLE;
}

// Returns 0, or 1 where no thread had memory: then nothing was done.
int anyorder_convolution(const anyorder::Job *job, int lanes, int threads, void *parallel) {
    using namespace anyorder;
    Work work;
    work.job = job;
    work.lanes = lanes;
    const int64_t C = job->channels, O = job->out_channels, *x = job->x_strides, *g = job->g_strides;
    const bool x_fits = !job->padding_h && !job->padding_w && (C == 1 || x[1] == 1) && x[3] == C;
    const bool g_fits = O % WIDTH[lanes] == 0 && g[1] == 1 && g[2] == job->out_width * g[3];
    work.x_row = x_fits ? x[2] : (job->width + 2 * job->padding_w) * C;
    work.g_pixel = g_fits ? g[3] : (O + WIDTH[lanes] - 1) / WIDTH[lanes] * WIDTH[lanes];
    work.x_size = x_fits ? 0 : (job->height + 2 * job->padding_h) * work.x_row;
    work.g_size = g_fits ? 0 : job->out_height * job->out_width * work.g_pixel;
    run_parallel(run_examples, &work, threads < job->batch ? threads : job->batch, parallel);
    return work.next < job->batch;
}

// squares (count,) of `count` runs of `size` floats, of which each begins `stride` after the one before.
void anyorder_squares(const float *rows, int64_t count, int64_t size, int64_t stride, double *squares, int lanes,
                      int threads, void *parallel) {
    using namespace anyorder;
    Rows work{rows, squares, count, size, stride, lanes};
    if (count * size < SMALL) threads = 1;
    run_parallel(run_rows, &work, threads < count ? threads : count, parallel);
}

// The clipped sums of small layers: norms, weights and sums in one call; the arithmetic is that of `norms`.
//
// weights (batch,) = min(scale, scale clip / (norm of the example, all layers together, times scale)), rounded down; 0
// for an example whose norm is NaN or infinite, which adds exactly zero. Returns how many these are; -1 where a float32
// would not do (an activation above `large`, or a sum that is not finite), or there is no memory: nothing counts then.
int64_t anyorder_clip(const anyorder::Layer *layers, int64_t count, int64_t batch, double scale, double clip,
                      float large, float *weights, int lanes) {
    using namespace anyorder;
    double *squares = (double *)std::calloc(batch + 1, sizeof(double));
    int64_t *good = (int64_t *)std::malloc((batch + 1) * sizeof(int64_t)), kept = 0, bad = 0;
    if (!squares || !good) bad = -1;
    for (int64_t i = 0; i < count && bad >= 0; ++i)
        for (int64_t b = 0; b < batch; ++b) {
            double one = square(lanes, layers[i].g + b * layers[i].g_stride, layers[i].outputs);
            if (layers[i].a) one *= square(lanes, layers[i].a + b * layers[i].a_stride, layers[i].inputs);
            squares[b] += one * (scale * scale);
        }
    for (int64_t b = 0; b < batch && bad >= 0; ++b) {
        weights[b] = 0;
        if (!std::isfinite(squares[b])) {
            ++bad;
            continue;
        }
        good[kept++] = b;
        const double cut = clip / std::sqrt(squares[b]), factor = scale * (cut < 1 ? cut : 1);
        weights[b] = (float)factor;
        if ((double)weights[b] > factor) weights[b] = std::nextafter(weights[b], 0.0f);
        for (int64_t i = 0; i < count; ++i)
            if (layers[i].a && greatest(lanes, layers[i].a + b * layers[i].a_stride, layers[i].inputs) > large) bad = -1;
    }
    for (int64_t i = 0; i < count && bad >= 0; ++i) {
        const int64_t size = layers[i].outputs * (layers[i].a ? layers[i].inputs : 1);
        if (!layers[i].out) continue;
        total(lanes, layers[i], weights, good, kept);
        if (!std::isfinite(greatest(lanes, layers[i].out, size))) bad = -1;
    }
    std::free(squares);
    std::free(good);
    return bad;
}

// Which rows of a table are read: distinct (.., ascending) the rows, place (n,) of each read among them; of n reads, of
// which each unit has `each` that follow each other. Reads of the row `none` (-1: no row) count for nothing: their place
// is -1. `twice`: whether a unit reads a row twice. Returns how many distinct rows there are; -1 where an id is not below
// `size`; -2 where there is no memory, or `size` or n are above 2^32.
int64_t anyorder_rank(const int64_t *ids, int64_t n, int64_t each, int64_t size, int64_t none, int64_t *distinct,
                      int64_t *place, int32_t *twice) {
    constexpr int DIGIT = 11, VALUES = 1 << DIGIT;
    if (size > (int64_t)1 << 32 || n > (int64_t)1 << 32) return -2;
    uint64_t *from = (uint64_t *)std::malloc((2 * n + 1) * sizeof(uint64_t)), *memory = from, *to = from + n;
    if (!memory) return -2;
    *twice = 0;
    int64_t count = 0;
    for (int64_t i = 0; i < n; ++i) {  // an id below zero is large without its sign
        if ((uint64_t)ids[i] >= (uint64_t)size) count = -1;
        from[i] = (uint64_t)ids[i] << 32 | (uint64_t)i;
    }
    for (int shift = 32; count == 0 && shift < 64 && (uint64_t)(size - 1) << 32 >> shift; shift += DIGIT) {
        int64_t first[VALUES] = {}, sum = 0;
        for (int64_t i = 0; i < n; ++i) ++first[from[i] >> shift & (VALUES - 1)];
        for (int64_t v = 0, own; v < VALUES; ++v, sum += own) own = first[v], first[v] = sum;
        for (int64_t i = 0; i < n; ++i) to[first[from[i] >> shift & (VALUES - 1)]++] = from[i];
        uint64_t *other = from;
        from = to;
        to = other;
    }
    for (int64_t i = 0; count >= 0 && i < n; ++i) {  // reads of one row in their order, which is that of units
        const int64_t row = (int64_t)(from[i] >> 32), read = (int64_t)(from[i] & 0xFFFFFFFF);
        if (row == none) {
            place[read] = -1;
            continue;
        }
        if (!count || row != distinct[count - 1])
            distinct[count++] = row;
        else
            *twice |= read / each == (int64_t)(from[i - 1] & 0xFFFFFFFF) / each;
        place[read] = count - 1;
    }
    std::free(memory);
    return count;
}

// sums (rows, width) = over units b and their reads k, in this order, weights[b] g[b, k] at row place[b, k]; a weight of
// 0 adds nothing, whatever g is. Returns whether all are finite.
int32_t anyorder_add_rows(const float *g, const int64_t *place, const float *weights, int64_t n, int64_t each,
                          int64_t width, float *sums, int64_t rows) {
    memset(sums, 0, rows * width * sizeof(float));
    for (int64_t unit = 0; unit * each < n; ++unit) {
        const float weight = weights[unit];
        if (weight == 0) continue;
        for (int64_t k = unit * each; k < (unit + 1) * each; ++k) {
            float *__restrict to = sums + place[k] * width;
            const float *__restrict from = g + k * width;
            for (int64_t i = 0; i < width; ++i) to[i] += from[i] * weight;
        }
    }
    float sum = 0;  // of zeros, where all are finite
    for (int64_t i = 0; i < rows * width; ++i) sum += sums[i] * 0.0f;
    return sum == 0;
}
}
