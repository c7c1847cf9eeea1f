// The gradient of one example for one instruction set. Included once for each, in a namespace of its own, with LANES
// (floats in a vector) and TAPS (the most sums kept in registers for each vector of output channels) defined.

typedef float F __attribute__((vector_size(4 * LANES)));

// For N neighbouring numbers of the patch and M vectors of output channels: their products, added up over positions.
// x: the numbers at the first position. g: the channels there. out: (N, out_channels), of whose last vector `last` are
// stored.
template <int M, int N>
static void tile(const Job &job, const Image &image, const float *x, const float *g, float *out, int last) {
    F sum[N][M] = {};
    for (int64_t h = 0; h < job.out_height; ++h) {
        const float *patch = x + h * job.stride_h * image.x_row, *back = g + h * job.out_width * image.g_pixel;
        for (int64_t w = 0; w < job.out_width; ++w) {
            F channels[M];
            for (int m = 0; m < M; ++m) memcpy(&channels[m], back + m * LANES, sizeof(F));
            for (int n = 0; n < N; ++n)
                for (int m = 0; m < M; ++m) sum[n][m] += channels[m] * patch[n];
            patch += job.stride_w * job.channels;
            back += image.g_pixel;
        }
    }
    for (int n = 0; n < N; ++n)
        for (int m = 0; m < M; ++m)
            memcpy(out + n * job.out_channels + m * LANES, &sum[n][m], m + 1 < M ? sizeof(F) : sizeof(float) * last);
}

// `count` neighbouring numbers, N at a time, and the rest fewer at a time.
template <int M, int N>
static void row(const Job &job, const Image &image, const float *x, const float *g, float *out, int64_t count, int last) {
    for (; count >= N; count -= N, x += N, out += N * job.out_channels) tile<M, N>(job, image, x, g, out, last);
    if constexpr (N > 1) row<M, N / 2>(job, image, x, g, out, count, last);
}

static void gradient(const Job &job, const Image &image, float *out) {
    const int64_t count = job.kernel_w * job.channels;
    for (int64_t k = 0; k < job.kernel_h; ++k, out += count * job.out_channels) {
        const float *x = image.x + k * job.dilation_h * image.x_row;
        for (int64_t o = 0; o < job.out_channels;) {
            const int64_t left = job.out_channels - o;
            if (left > LANES) {
                row<2, TAPS>(job, image, x, image.g + o, out + o, count, left < 2 * LANES ? (int)(left - LANES) : LANES);
                o += 2 * LANES;
            } else {
                row<1, TAPS>(job, image, x, image.g + o, out + o, count, (int)left);
                o += LANES;
            }
        }
    }
}

// The squared norm, added up in float64, or a little more: rounding is off by a factor of at most 1 + size 2^-53.
static double square(const float *v, int64_t size) {
    typedef float H __attribute__((vector_size(2 * LANES)));
    typedef double D __attribute__((vector_size(4 * LANES)));
    D sum[4] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES)
        for (int j = 0; j < 4; ++j) {
            H h;
            memcpy(&h, v + i + j * LANES / 2, sizeof h);
            const D d = __builtin_convertvector(h, D);
            sum[j] += d * d;
        }
    double total = 0;
    for (; i < size; ++i) total += (double)v[i] * v[i];
    sum[0] += sum[1] + sum[2] + sum[3];
    for (int j = 0; j < LANES / 2; ++j) total += sum[0][j];
    return total * (1 + (double)(size + 8) * 0x1p-52);
}

// O rows of the sum over examples of w g (x) a, from row o on; each product with a weight is rounded by itself.
template <int O>
static void outer(const Layer &layer, const float *weights, const int64_t *examples, int64_t count, int64_t o) {
    constexpr int MANY = 2;  // vectors of a row that are kept in registers
    const int64_t n = layer.inputs;
    const float *g = layer.g + o;
    float *out = layer.out + o * n;
    int64_t i = 0;
    for (; i + MANY * LANES <= n; i += MANY * LANES) {
        F sum[O][MANY] = {};
        for (int64_t e = 0; e < count; ++e) {
            const int64_t b = examples[e];
            F v[MANY];
            for (int m = 0; m < MANY; ++m) memcpy(&v[m], layer.a + b * layer.a_stride + i + m * LANES, sizeof(F));
            for (int r = 0; r < O; ++r) {
                const float moved = weights[b] * g[b * layer.g_stride + r];
                for (int m = 0; m < MANY; ++m) sum[r][m] += v[m] * moved;
            }
        }
        for (int r = 0; r < O; ++r)
            for (int m = 0; m < MANY; ++m) memcpy(out + r * n + i + m * LANES, &sum[r][m], sizeof(F));
    }
    for (; i < n; i += LANES) {
        const int64_t left = n - i < LANES ? n - i : LANES;
        F sum[O] = {};
        for (int64_t e = 0; e < count; ++e) {
            const int64_t b = examples[e];
            F v = {};
            memcpy(&v, layer.a + b * layer.a_stride + i, sizeof(float) * left);
            for (int r = 0; r < O; ++r) sum[r] += v * (weights[b] * g[b * layer.g_stride + r]);
        }
        for (int r = 0; r < O; ++r) memcpy(out + r * n + i, &sum[r], sizeof(float) * left);
    }
}

static void outer_sum(const Layer &layer, const float *weights, const int64_t *examples, int64_t count) {
    int64_t o = 0;
    for (; o + 4 <= layer.outputs; o += 4) outer<4>(layer, weights, examples, count, o);
    for (; o < layer.outputs; ++o) outer<1>(layer, weights, examples, count, o);
}

// out (outputs) = the sum over examples of w g.
static void rows_sum(const Layer &layer, const float *weights, const int64_t *examples, int64_t count) {
    float *out = layer.out;
    for (int64_t o = 0; o < layer.outputs; ++o) out[o] = 0;
    for (int64_t e = 0; e < count; ++e) {
        const float w = weights[examples[e]], *g = layer.g + examples[e] * layer.g_stride;
        for (int64_t o = 0; o < layer.outputs; ++o) out[o] += w * g[o];
    }
}

// The largest absolute value; what is no number is larger than all. By their bits, which order as the values do.
static float greatest(const float *v, int64_t size) {
    uint32_t most = 0;
    for (int64_t i = 0; i < size; ++i) {
        uint32_t bits;
        memcpy(&bits, v + i, sizeof bits);
        bits &= 0x7FFFFFFFu;
        most = bits > most ? bits : most;
    }
    float value;
    memcpy(&value, &most, sizeof value);
    return value;
}
