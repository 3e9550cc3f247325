// `out = x @ w.T` over the CPU's packed panels (kernels/matmul.py): an output is a sum, first to last, of chains of 32 fused
// multiply-adds over K, each from 0. Chains know nothing of one another, so threads may share them, and an output's bits depend
// neither on that nor on the number of rows.
//
// `matmul_*_1`, `_2`, `_4` and `_8` are for few rows, up to 32 or so, where reading the weights takes all the time: an output's
// chains are shared by the threads of a block. `matmul_*_tiles` is for more: weights are read once for 64 rows.
#pragma once
#include "common.cuh"

constexpr int PANEL = 64, QUADS = PANEL / 4;  // outputs of a panel; a thread has a quad of them, four side by side
constexpr int LINKS = 32;                     // products of a chain: a block of q8_0

// One quad of a panel of f32 `[depth, 64]`, depth a multiple of 8.
struct F32Quad {
    typedef float4 Raw;
    static constexpr int AHEAD = 8;  // steps along K that are read before the first of them is used
    const float4* at;
    int depth;
};

// One quad of a panel of bf16 `[depth, 64]`, depth a multiple of 8.
struct Bf16Quad {
    typedef uint2 Raw;
    static constexpr int AHEAD = 8;
    const uint2* at;
    int depth;
};

// One quad of a panel of i8 `[depth, 64]` with f16 scales `[depth / 32, 64]`.
struct Q8Quad {
    typedef u32 Raw;
    static constexpr int AHEAD = 32;
    const u32* at;
    const u16* scales;
    int depth;
};

// Where the `quad`-th quad of all starts, in quads.
DEVICE i64 quad_start(int depth, int quad) { return static_cast<i64>(quad / QUADS) * depth * QUADS + quad % QUADS; }

DEVICE F32Quad quad_of(const float* panels, int depth, int quad) {
    return {reinterpret_cast<const float4*>(panels) + quad_start(depth, quad), depth};
}

DEVICE Bf16Quad quad_of(const u16* panels, int depth, int quad) {
    return {reinterpret_cast<const uint2*>(panels) + quad_start(depth, quad), depth};
}

DEVICE Q8Quad quad_of(const i8* panels, const u16* scales, int depth, int quad) {
    return {
        reinterpret_cast<const u32*>(panels) + quad_start(depth, quad), scales + 4 * quad_start(depth / LINKS, quad), depth};
}

DEVICE float4 four(float x) { return make_float4(x, x, x, x); }

DEVICE float4 sum_of(const float4& left, const float4& right) {
    return make_float4(left.x + right.x, left.y + right.y, left.z + right.z, left.w + right.w);
}

DEVICE float half_of(u16 bits) { return __half2float(__ushort_as_half(bits)); }

DEVICE float4 scales_of(const F32Quad&, int) { return four(1.f); }

DEVICE float4 scales_of(const Bf16Quad&, int) { return four(1.f); }

DEVICE float4 scales_of(const Q8Quad& quad, int chain) {
    const u16* at = quad.scales + chain * PANEL;
    return make_float4(half_of(at[0]), half_of(at[1]), half_of(at[2]), half_of(at[3]));
}

// One of four bytes that 128 was added to, as f32: as the last bits of 2^23 it needs no conversion, which a GPU is slow at.
DEVICE float unbiased(u32 biased, int index) {
    return __uint_as_float(0x4b000000u | (biased >> 8 * index & 0xffu)) - (8388608.f + 128.f);
}

DEVICE float4 weights_of(const float4& raw, const float4&) { return raw; }

// A bf16 is the upper half of an f32.
DEVICE float4 weights_of(const uint2& raw, const float4&) {
    return make_float4(
        __uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u), __uint_as_float(raw.y << 16),
        __uint_as_float(raw.y & 0xffff0000u));
}

// `d * q`, exact in f32.
DEVICE float4 weights_of(u32 raw, const float4& d) {
    const u32 biased = raw ^ 0x80808080u;
    return make_float4(
        unbiased(biased, 0) * d.x, unbiased(biased, 1) * d.y, unbiased(biased, 2) * d.z, unbiased(biased, 3) * d.w);
}

DEVICE void add_products(float4& sums, float x, const float4& weights) {
    sums.x = __fmaf_rn(x, weights.x, sums.x);
    sums.y = __fmaf_rn(x, weights.y, sums.y);
    sums.z = __fmaf_rn(x, weights.z, sums.z);
    sums.w = __fmaf_rn(x, weights.w, sums.w);
}

// Four steps along K for each row; row `r`'s values are at `x + r * stride`, 16-byte aligned.
template <int ROWS>
DEVICE void add_four_steps(float4 (&sums)[ROWS], const float* x, int stride, const float4 (&weights)[4]) {
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const float4 values = *reinterpret_cast<const float4*>(x + row * stride);
        add_products(sums[row], values.x, weights[0]);
        add_products(sums[row], values.y, weights[1]);
        add_products(sums[row], values.z, weights[2]);
        add_products(sums[row], values.w, weights[3]);
    }
}

// One chain of each row.
template <int ROWS, class Quad>
DEVICE void add_chain(float4 (&sums)[ROWS], const float* x, int stride, const Quad& quad, int chain) {
    const float4 d = scales_of(quad, chain);
    const int first = chain * LINKS, links = min(quad.depth - first, LINKS);
    for (int k = 0; k < links; k += Quad::AHEAD) {
        typename Quad::Raw raw[Quad::AHEAD];
#pragma unroll
        for (int i = 0; i < Quad::AHEAD; i++) raw[i] = quad.at[static_cast<i64>(first + k + i) * QUADS];
#pragma unroll
        for (int i = 0; i < Quad::AHEAD; i += 4) {
            const float4 weights[4] = {
                weights_of(raw[i], d), weights_of(raw[i + 1], d), weights_of(raw[i + 2], d), weights_of(raw[i + 3], d)};
            add_four_steps<ROWS>(sums, x + k + i, stride, weights);
        }
    }
}

// Writes those of a quad's outputs that there are.
DEVICE void store_quad(float* out, const float4& sums, int outputs) {
    if (outputs > 0) out[0] = sums.x;
    if (outputs > 1) out[1] = sums.y;
    if (outputs > 2) out[2] = sums.z;
    if (outputs > 3) out[3] = sums.w;
}

// Copies `span` of x's columns from `first` on, of ROWS rows, into shared memory; NOTHING where x has none.
template <int ROWS>
DEVICE void stage_rows(float* to, int span, const float* x, i64 row0, i64 rows, int first, int n_in) {
    for (int row = 0; row < ROWS; row++)
        for (int at = threadIdx.y * blockDim.x + threadIdx.x; at < span; at += blockDim.x * blockDim.y)
            to[row * span + at] = row0 + row < rows && first + at < n_in ? x[(row0 + row) * n_in + first + at] : NOTHING;
}

// A block's threads are (quad, slot): it takes as many chains at a time as there are slots, and the thread whose slot is a row
// adds that row's up in their order.
template <int ROWS, class Quad>
DEVICE void multiply_few(const float* x, i64 rows, int n_in, const Quad& quad, float* out, int n_out) {
    DYNAMIC_SHARED(staged);  // [ROWS, span] of x
    const int quads = blockDim.x, slots = blockDim.y, slot = threadIdx.y, span = slots * LINKS;
    float4* parts = reinterpret_cast<float4*>(staged + ROWS * span) + threadIdx.x;  // [slots, ROWS, quads]
    const i64 row0 = static_cast<i64>(blockIdx.x) * ROWS;
    float4 total = four(NOTHING);
    for (int first = 0; first < n_in; first += span) {
        stage_rows<ROWS>(staged, span, x, row0, rows, first, n_in);
        __syncthreads();
        if (first + slot * LINKS < n_in) {
            float4 sums[ROWS] = {};
            add_chain<ROWS>(sums, staged + slot * LINKS, span, quad, first / LINKS + slot);
#pragma unroll
            for (int row = 0; row < ROWS; row++) parts[(slot * ROWS + row) * quads] = sums[row];
        }
        __syncthreads();
        const int chains = slot < ROWS ? min((n_in - first + LINKS - 1) / LINKS, slots) : 0;
#pragma unroll 4
        for (int chain = 0; chain < chains; chain++) total = sum_of(total, parts[(chain * ROWS + slot) * quads]);
    }
    const i64 row = row0 + slot;
    const int output = (blockIdx.y * quads + threadIdx.x) * 4;
    if (slot < ROWS && row < rows) store_quad(out + row * n_out + output, total, n_out - output);
}

constexpr int TILE_ROWS = 64, GROUPS = 8, GROUP_ROWS = TILE_ROWS / GROUPS;
constexpr int X_STRIDE = LINKS + 4;  // elements of a row of x in shared memory: rows side by side are in other banks

// What a thread carries into shared memory for one chain: its parts of the tile's x and of the panel's weights.
template <class Quad>
struct Load {
    float x[TILE_ROWS / 4];
    typename Quad::Raw raw[LINKS / GROUPS];
    float4 d;
};

// Rows past the tile's `rows` are copies of its last, and nobody reads what comes of them.
template <class Quad>
DEVICE void fetch(Load<Quad>& load, const float* x, int rows, int n_in, const Quad& quad, int chain) {
    const int thread = threadIdx.y * QUADS + threadIdx.x, k = chain * LINKS + thread % LINKS;
#pragma unroll
    for (int i = 0; i < TILE_ROWS / 4; i++)
        load.x[i] = k < n_in ? x[min(thread / LINKS + 4 * i, rows - 1) * n_in + k] : NOTHING;
#pragma unroll
    for (int i = 0; i < LINKS / GROUPS; i++) {
        const int step = chain * LINKS + threadIdx.y + GROUPS * i;
        load.raw[i] = step < quad.depth ? quad.at[static_cast<i64>(step) * QUADS] : typename Quad::Raw();
    }
    load.d = scales_of(quad, chain);
}

template <class Quad>
DEVICE void put(const Load<Quad>& load, float* x_tile, float4* weight_tile) {
    const int thread = threadIdx.y * QUADS + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TILE_ROWS / 4; i++) x_tile[(thread / LINKS + 4 * i) * X_STRIDE + thread % LINKS] = load.x[i];
#pragma unroll
    for (int i = 0; i < LINKS / GROUPS; i++)
        weight_tile[(threadIdx.y + GROUPS * i) * QUADS + threadIdx.x] = weights_of(load.raw[i], load.d);
}

// One chain of each of a thread's rows, added to their totals.
DEVICE void add_tile(float4 (&totals)[GROUP_ROWS], const float* x_tile, const float4* weight_tile) {
    float4 sums[GROUP_ROWS] = {};
#pragma unroll 2
    for (int k = 0; k < LINKS; k += 4) {
        const float4* at = weight_tile + k * QUADS + threadIdx.x;
        const float4 weights[4] = {at[0], at[QUADS], at[2 * QUADS], at[3 * QUADS]};
        add_four_steps<GROUP_ROWS>(sums, x_tile + threadIdx.y * X_STRIDE + k, GROUPS * X_STRIDE, weights);
    }
#pragma unroll
    for (int row = 0; row < GROUP_ROWS; row++) totals[row] = sum_of(totals[row], sums[row]);
}

// A tile of 64 rows and a panel's outputs; a thread is (quad, group) and has every 8th row. A chain's values are on their way
// while the one before is summed.
template <class Quad>
DEVICE void multiply_tile(const float* x, i64 rows, int n_in, const Quad& quad, float* out, int n_out) {
    DYNAMIC_SHARED(x_tile);                                                          // [TILE_ROWS, X_STRIDE]
    float4* weight_tile = reinterpret_cast<float4*>(x_tile + TILE_ROWS * X_STRIDE);  // [LINKS, QUADS]
    const i64 row0 = static_cast<i64>(blockIdx.x) * TILE_ROWS;
    const int tile_rows = static_cast<int>(min(rows - row0, static_cast<i64>(TILE_ROWS)));
    const int chains = (n_in + LINKS - 1) / LINKS;
    x += row0 * n_in;
    float4 totals[GROUP_ROWS];
#pragma unroll
    for (int row = 0; row < GROUP_ROWS; row++) totals[row] = four(NOTHING);
    Load<Quad> load;
    fetch(load, x, tile_rows, n_in, quad, 0);
    for (int chain = 0; chain < chains; chain++) {
        put(load, x_tile, weight_tile);
        __syncthreads();
        if (chain + 1 < chains) fetch(load, x, tile_rows, n_in, quad, chain + 1);
        add_tile(totals, x_tile, weight_tile);
        __syncthreads();
    }
    const int output = (blockIdx.y * QUADS + threadIdx.x) * 4;
#pragma unroll
    for (int i = 0; i < GROUP_ROWS; i++) {
        const int row = threadIdx.y + GROUPS * i;
        if (row < tile_rows) store_quad(out + (row0 + row) * n_out + output, totals[i], n_out - output);
    }
}

DEVICE int own_quad() { return blockIdx.y * blockDim.x + threadIdx.x; }

#define OF_PLAIN(name, multiply, weight)                                                                                        \
    KERNEL name(                                                                                                               \
        const float* __restrict__ x, i64 rows, int n_in, const weight* __restrict__ panels, int depth,                         \
        float* __restrict__ out, int n_out) {                                                                                  \
        multiply(x, rows, n_in, quad_of(panels, depth, own_quad()), out, n_out);                                               \
    }
#define OF_Q8(name, multiply)                                                                                                  \
    KERNEL name(                                                                                                               \
        const float* __restrict__ x, i64 rows, int n_in, const i8* __restrict__ panels, const u16* __restrict__ scales,        \
        int depth, float* __restrict__ out, int n_out) {                                                                       \
        multiply(x, rows, n_in, quad_of(panels, scales, depth, own_quad()), out, n_out);                                       \
    }

// Few rows: R = 1, 2, 4 or 8 of them a block; blocks with the same weights run side by side and find them in the L2 cache.
// Panels are 16-byte aligned. Grid: (ceil(rows / R), panels * 16 / quads). Block: (quads, slots): quads 16, or 8 or 4 where so
// few panels would not fill the GPU; slots 256 / quads, but 128 / quads for R = 8. Shared: 4 * R * slots * (32 + 4 * quads), at
// most 48 KB.
OF_PLAIN(matmul_f32_1, multiply_few<1>, float)
OF_PLAIN(matmul_f32_2, multiply_few<2>, float)
OF_PLAIN(matmul_f32_4, multiply_few<4>, float)
OF_PLAIN(matmul_f32_8, multiply_few<8>, float)
OF_PLAIN(matmul_bf16_1, multiply_few<1>, u16)
OF_PLAIN(matmul_bf16_2, multiply_few<2>, u16)
OF_PLAIN(matmul_bf16_4, multiply_few<4>, u16)
OF_PLAIN(matmul_bf16_8, multiply_few<8>, u16)
OF_Q8(matmul_q8_1, multiply_few<1>)
OF_Q8(matmul_q8_2, multiply_few<2>)
OF_Q8(matmul_q8_4, multiply_few<4>)
OF_Q8(matmul_q8_8, multiply_few<8>)

// Many rows. Panels are 16-byte aligned. Grid: (ceil(rows / 64), panels). Block: (16, 8). Shared: 4 * 64 * (36 + 32) = 17408.
OF_PLAIN(matmul_f32_tiles, multiply_tile, float)
OF_PLAIN(matmul_bf16_tiles, multiply_tile, u16)
OF_Q8(matmul_q8_tiles, multiply_tile)

#undef OF_PLAIN
#undef OF_Q8
