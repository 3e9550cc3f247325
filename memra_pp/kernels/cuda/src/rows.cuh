// What a layer does row by row between its products: norms, activations, rotary embeddings, residuals (kernels/ops.py and
// kernels/heads.py). A row's bits depend on that row alone.
#pragma once
#include "common.cuh"

constexpr int SUMS = 16;  // sums of squares side by side: as many as the CPU's vectors have lanes
constexpr double LOG2_E = 1.4426950408889634, LN2 = 0.6931471805599453;
constexpr double ROUNDER = 6755399441055744.0;  // 1.5 * 2^52: added and taken away again, it rounds to an integer
constexpr double GELU_SLOPE = 0.7978845608028654, GELU_CUBIC = 0.044715;

DEVICE i64 thread_index() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
DEVICE i64 warp_index() { return static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + warp_id(); }

// e^x to 1e-9 of its value, |x| clamped to 700: by the CPU's polynomial, not by a library's, whose bits are its own.
DEVICE double exponential(double x) {
    x = x < -700.0 ? -700.0 : x > 700.0 ? 700.0 : x;
    const double shifted = x * LOG2_E + ROUNDER;
    const double rest = x - (shifted - ROUNDER) * LN2;
    double power = 1.0 / 5040 + rest * (1.0 / 40320);
    power = 1.0 / 720 + rest * power;
    power = 1.0 / 120 + rest * power;
    power = 1.0 / 24 + rest * power;
    power = 1.0 / 6 + rest * power;
    power = 1.0 / 2 + rest * power;
    power = 1.0 + rest * power;
    power = 1.0 + rest * power;
    const u64 exponent = static_cast<u64>(__double_as_longlong(shifted)) << 52;
    return __longlong_as_double(__double_as_longlong(power) + static_cast<i64>(exponent));
}

DEVICE double sigmoid(double x) { return 1.0 / (1.0 + exponential(-x)); }

DEVICE float silu(double x) { return static_cast<float>(x * sigmoid(x)); }

// The sum of a row's squares, for each lane of the warp that calls it: 16 sums side by side, folded, then what is left of the
// row. Both halves of the warp do the same.
DEVICE float sum_of_squares(const float* row, int width) {
    const int whole = width / SUMS * SUMS;
    float squares = 0.f;
#pragma unroll 8
    for (int at = lane_id() % SUMS; at < whole; at += SUMS) squares = __fmaf_rn(row[at], row[at], squares);
    float total = sum_of_16(squares);
    for (int at = whole; at < width; at++) total = __fmaf_rn(row[at], row[at], total);
    return total;
}

// What an RMS norm multiplies a row by, for each lane of the warp that calls it.
DEVICE float inverse_rms(const float* row, int width, float eps) {
    return 1.f / __fsqrt_rn(sum_of_squares(row, width) / static_cast<float>(width) + eps);
}

// Normalises the block's `blockDim.y` rows. A row waits in shared memory: its squares are added up by 16 threads alone, and
// what these read one after the other should be near.
template <bool ADDED>
DEVICE void normalise(const float* x, const float* weight, float eps, float* out, i64 rows, int width) {
    DYNAMIC_SHARED(shared);
    float* values = shared + threadIdx.y * width;
    float* inverse = shared + blockDim.y * width + threadIdx.y;
    const i64 row = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
    const int end = row < rows ? width : 0;
    for (int at = threadIdx.x; at < end; at += blockDim.x) values[at] = x[row * width + at];
    __syncthreads();
    if (end && threadIdx.x < WARP) {
        const float found = inverse_rms(values, width, eps);
        if (threadIdx.x == 0) *inverse = found;
    }
    __syncthreads();
    for (int at = threadIdx.x; at < end; at += blockDim.x) {
        const float value = values[at] * *inverse * weight[at];
        out[row * width + at] = ADDED ? out[row * width + at] + value : value;
    }
}

// `out = x / sqrt(mean(x^2) + eps) * weight` of each row; `out` may be `x`. Grid: ceil(rows / blockDim.y). Block: (threads a
// row, a multiple of 32; rows), as (32, 8) for a head's width and (256, 1) for a hidden row's.
// Shared: 4 * blockDim.y * (width + 1).
KERNEL rms_norm(const float* x, const float* weight, float eps, float* out, i64 rows, int width) {
    normalise<false>(x, weight, eps, out, rows, width);
}

// `acc += rms_norm(x)`. Grid, block and shared as of `rms_norm`.
KERNEL add_rms_norm(const float* x, const float* weight, float eps, float* acc, i64 rows, int width) {
    normalise<true>(x, weight, eps, acc, rows, width);
}

// Cosines and sines, `[rows, pairs]`, of the angles `f32(position) * inv_freq`, which are rounded to f32.
// Grid: ceil(rows * pairs / 256). Block: 256.
KERNEL rope_tables(
    const i64* __restrict__ positions, const float* __restrict__ inv_freq, float* __restrict__ cosines,
    float* __restrict__ sines, i64 rows, int pairs) {
    const i64 at = thread_index();
    if (at >= rows * pairs) return;
    const double angle = static_cast<float>(positions[at / pairs]) * inv_freq[at % pairs];
    cosines[at] = static_cast<float>(cos(angle));
    sines[at] = static_cast<float>(sin(angle));
}

// A head as `split_heads` leaves it: normalised, its first `2 * pairs` elements rotated. By one warp.
DEVICE void norm_and_rotate(
    const float* head, const float* norm, float eps, const float* cosines, const float* sines, int pairs, int width,
    float* out) {
    const float inverse = inverse_rms(head, width, eps);
    for (int pair = lane_id(); pair < pairs; pair += WARP) {
        const float first = head[pair] * inverse * norm[pair];
        const float second = head[pairs + pair] * inverse * norm[pairs + pair];
        out[pair] = first * cosines[pair] - second * sines[pair];
        out[pairs + pair] = second * cosines[pair] + first * sines[pair];
    }
    for (int at = 2 * pairs + lane_id(); at < width; at += WARP) out[at] = head[at] * inverse * norm[at];
}

// Rows of q, k and v side by side, into `q` and `k`, each head normalised and rotated (GPT-NeoX pairs), and `v` as it comes.
// `cosines` and `sines` are `[rows, pairs]`. A warp a head. Grid: ceil(rows * (n_head + 2 * n_head_kv) / 8). Block: 256.
KERNEL split_heads(
    const float* __restrict__ qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm, float eps,
    const float* __restrict__ cosines, const float* __restrict__ sines, float* __restrict__ q, float* __restrict__ k,
    float* __restrict__ v, i64 rows, int n_head, int n_head_kv, int dim_k, int dim_v, int pairs) {
    const int rotated = n_head + n_head_kv, heads = rotated + n_head_kv;
    const i64 row = warp_index() / heads;
    const int head = static_cast<int>(warp_index() % heads);
    if (row >= rows) return;  // whole warps leave together
    const float* of_row = qkv + row * (rotated * dim_k + n_head_kv * dim_v);
    if (head < rotated) {
        const bool of_q = head < n_head;
        float* out = of_q ? q + (row * n_head + head) * dim_k : k + (row * n_head_kv + head - n_head) * dim_k;
        const float *norm = of_q ? q_norm : k_norm, *from = of_row + head * dim_k;
        norm_and_rotate(from, norm, eps, cosines + row * pairs, sines + row * pairs, pairs, dim_k, out);
    } else {
        const int index = head - rotated;
        const float* from = of_row + rotated * dim_k + index * dim_v;
        for (int at = lane_id(); at < dim_v; at += WARP) v[(row * n_head_kv + index) * dim_v + at] = from[at];
    }
}

// `gate = gelu_tanh(gate) * up`; 0.5 (1 + tanh(u)) is sigmoid(2 u). Grid: ceil(count / 256). Block: 256.
KERNEL gelu_tanh_mul(float* __restrict__ gate, const float* __restrict__ up, i64 count) {
    const i64 at = thread_index();
    if (at >= count) return;
    const double x = gate[at];
    gate[at] = static_cast<float>(x * sigmoid(2 * GELU_SLOPE * (x + GELU_CUBIC * x * x * x))) * up[at];
}

// `gate = gate * sigmoid(gate) * up`. Grid: ceil(count / 256). Block: 256.
KERNEL silu_mul(float* __restrict__ gate, const float* __restrict__ up, i64 count) {
    const i64 at = thread_index();
    if (at < count) gate[at] = silu(gate[at]) * up[at];
}

// `x *= sigmoid(gate)`. Grid: ceil(count / 256). Block: 256.
KERNEL sigmoid_mul(float* __restrict__ x, const float* __restrict__ gate, i64 count) {
    const i64 at = thread_index();
    if (at < count) x[at] *= static_cast<float>(sigmoid(gate[at]));
}

// `acc += x`. Grid: ceil(count / 256). Block: 256.
KERNEL add_into(float* __restrict__ acc, const float* __restrict__ x, i64 count) {
    const i64 at = thread_index();
    if (at < count) acc[at] += x[at];
}

// `x = tanh(x / cap) * cap`. The tanh is taken in f64 and rounded once; NumPy's of f32 is an ulp off here and there.
// Grid: ceil(count / 256). Block: 256.
KERNEL soft_cap(float* x, float cap, i64 count) {
    const i64 at = thread_index();
    if (at < count) x[at] = static_cast<float>(tanh(static_cast<double>(x[at] / cap))) * cap;
}

// `out[i] = x[rows[i]]`, rows of `width`. Grid: ceil(count * width / 256). Block: 256.
KERNEL gather_rows(
    const float* __restrict__ x, const i64* __restrict__ rows, float* __restrict__ out, i64 count, int width) {
    const i64 at = thread_index();
    if (at < count * width) out[at] = x[rows[at / width] * width + at % width];
}
