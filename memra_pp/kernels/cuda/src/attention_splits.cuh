// Attention by splits: stored rows are used as they are unpacked, for the few query vectors that registers have room for.
#pragma once
#include "attention_tiles.cuh"

namespace attention {

constexpr int SPLIT = 256;  // keys; splits lie on multiples of it of the absolute row
constexpr int SPLIT_WARPS = 4, SPLIT_THREADS = SPLIT_WARPS * WARP, COMBINE_THREADS = 256;
constexpr int EXTRA = 4;  // behind a split's sums: peak and total, and as much as makes a result a multiple of 16 bytes

template <int CODE>
DEVICE void read_half(const u8* block, int half, const int (&quads)[4], float4 (&key)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) key[i] = quad_at<CODE>(block, half, quads[i]);
}

// A warp's share of the dot products of a lane's key with all vectors: every fourth half of a block. Quad `j` of the vectors is
// at queries + j * VECTORS * 4.
template <int VECTORS>
DEVICE void score_key(int code, const u8* row, const float* queries, int dim, float* shares) {
    // Rows 8 apart start in the same bank: each of their lanes begins with another quad.
    int quads[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) quads[i] = (i + lane_id() / 8) % 4;
    const int bytes = block_bytes(code);
    float sums[VECTORS] = {};
    for (int part = warp_id(); part < dim / 16; part += SPLIT_WARPS) {
        float4 key[4];
        WITH_FORMAT(code, read_half<FORMAT>(row + part / 2 * bytes, part % 2, quads, key))
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* query = queries + (part * 4 + quads[i]) * VECTORS * 4;
#pragma unroll
            for (int vector = 0; vector < VECTORS; ++vector)
                sums[vector] = dot(four_at(query + vector * 4), key[i], sums[vector]);
        }
    }
#pragma unroll
    for (int vector = 0; vector < VECTORS; ++vector) shares[(warp_id() * VECTORS + vector) * TILE + lane_id()] = sums[vector];
}

DEVICE float sum_of_shares(const float* at, int stride) {
    return (at[0] + at[stride]) + (at[2 * stride] + at[3 * stride]);
}

// What a thread adds up: one of so many columns, of the keys (or splits) that are `lane` modulo `lanes`.
struct Column {
    int index, lane, lanes;
};

DEVICE Column own_column(int columns) {
    const int thread = threadIdx.x, threads = blockDim.x;
    return {thread % columns, thread / columns, threads / columns};
}

// A column of values: a quad of either half of a block, which share bytes in q5_1 and q4_0.
template <int VECTORS>
using ColumnSums = float4[VECTORS][2];

template <int CODE>
DEVICE void read_column(const u8* block, int quad, float4& low, float4& high) {
    low = quad_at<CODE>(block, 0, quad);
    high = quad_at<CODE>(block, 1, quad);
}

DEVICE int first_element(int column) { return column / 4 * 32 + column % 4 * 4; }

template <int N>
DEVICE void load(float (&to)[N], const float* from) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = N % 4 ? from[i] : element(four_at(from + i / 4 * 4), i % 4);
}

// Adds the weighted values of a tile that all vectors see whole. `weights` are key by key.
template <int VECTORS, int CODE>
DEVICE void add_column(
    ColumnSums<VECTORS>& sums, const Column& column, const Stored& v, const u8* copy, int tile, const float* weights) {
    for (int key = column.lane; key < TILE; key += column.lanes) {
        const u8* block = copied_row(v, copy, tile, key) + column.index / 4 * block_bytes(CODE);
        float4 low, high;
        read_column<CODE>(block, column.index % 4, low, high);
        float own[VECTORS];
        load(own, weights + key * VECTORS);
#pragma unroll
        for (int vector = 0; vector < VECTORS; ++vector) {
            multiply_add(sums[vector][0], own[vector], low);
            multiply_add(sums[vector][1], own[vector], high);
        }
    }
}

// The same of a tile that some see in part.
template <int VECTORS>
DEVICE void add_seen_column(
    ColumnSums<VECTORS>& sums, const Column& column, const Stored& v, const u8* copy, int tile, const float* weights,
    const int2* seen) {
    for (int key = column.lane; key < TILE; key += column.lanes) {
        const u8* block = copied_row(v, copy, tile, key) + column.index / 4 * block_bytes(v.code);
        float4 low, high;
        WITH_FORMAT(v.code, read_column<FORMAT>(block, column.index % 4, low, high))
#pragma unroll
        for (int vector = 0; vector < VECTORS; ++vector) {
            if (!sees(seen[vector], key)) continue;
            multiply_add(sums[vector][0], weights[key * VECTORS + vector], low);
            multiply_add(sums[vector][1], weights[key * VECTORS + vector], high);
        }
    }
}

template <int VECTORS>
DEVICE void decay(ColumnSums<VECTORS>& sums, const float* decays) {
#pragma unroll
    for (int vector = 0; vector < VECTORS; ++vector) {
        const float by = decays[vector];
        if (by == 1.f) continue;  // nearly always
        sums[vector][0] = scaled(sums[vector][0], by);
        sums[vector][1] = scaled(sums[vector][1], by);
    }
}

// Adds up what the threads of a column have, in the order of their lanes.
template <int VECTORS>
DEVICE void merge(const ColumnSums<VECTORS>& own, const Column& column, int dim, float* sums) {
    for (int lane = 0; lane < column.lanes; ++lane) {
        if (lane == column.lane) {
#pragma unroll
            for (int i = 0; i < 2 * VECTORS; ++i) {
                float4& sum = four_at(sums + i / 2 * dim + first_element(column.index) + i % 2 * 16);
                sum = lane ? plus(sum, own[i / 2][i % 2]) : own[i / 2][i % 2];
            }
        }
        __syncthreads();
    }
}

// The keys of one split for at most VECTORS vectors.
template <int VECTORS>
DEVICE void split(
    const float* q, const i64* planes, const i64* bases, const i64* blocks, const Shape& shape, float scale, float* results) {
    const Unit unit = unit_of(blocks + blockIdx.z * BLOCK_COLUMNS, blockIdx.x, shape);
    const int start = (unit.first / SPLIT + static_cast<int>(blockIdx.y)) * SPLIT;
    const int first = max(unit.first, start), end = min(unit.end, start + SPLIT);
    if (first >= end) return;
    const Stored k = stored_k(planes, bases, shape, unit), v = stored_v(planes, bases, shape, unit);
    DYNAMIC_SHARED(shared);
    float* queries = shared;
    float* sums = queries + VECTORS * shape.dim_k;
    float* shares = sums + VECTORS * shape.dim_v;
    float* weights = shares + VECTORS * SPLIT_WARPS * TILE;
    const Softmax softmax = softmax_at(weights + VECTORS * TILE, VECTORS);
    u8* copy = reinterpret_cast<u8*>(weights + VECTORS * (TILE + SOFTMAX));
    u8* next_copy = copy + TILE * (k.room + v.room);

    load_queries(q, unit, shape, VECTORS, queries, 4, VECTORS * 4);
    for (int i = threadIdx.x; i < VECTORS * TILE; i += SPLIT_THREADS) weights[i] = 0.f;
    begin(softmax, unit, VECTORS);
    const Column column = own_column(shape.dim_v / 8);
    ColumnSums<VECTORS> own = {};
    copy_tile(k, v, first, end, copy);
    for (int tile = first / TILE * TILE; tile < end; tile += TILE) {
        wait_for_copies();
        __syncthreads();  // the tile is there, and the one before is done with
        copy_tile(k, v, tile + TILE, end, next_copy);
        score_key<VECTORS>(k.code, copied_row(k, copy, tile, lane_id()), queries, shape.dim_k, shares);
        __syncthreads();
        for (int vector = warp_id(); vector < unit.count; vector += SPLIT_WARPS) {
            const float score = sum_of_shares(shares + vector * TILE + lane_id(), VECTORS * TILE) * scale;
            weights[lane_id() * VECTORS + vector] = weigh(softmax, vector, tile, shape.window, score);
        }
        __syncthreads();
        decay<VECTORS>(own, softmax.decays);
        const bool whole = first_key(unit.end - 1, shape.window) <= tile && tile + TILE <= unit.pos + 1;
        const u8* v_copy = copy + TILE * k.room;
        if (whole) WITH_FORMAT(v.code, add_column<VECTORS, FORMAT>(own, column, v, v_copy, tile, weights))
        else add_seen_column<VECTORS>(own, column, v, v_copy, tile, weights, softmax.seen);
        u8* done = copy;
        copy = next_copy, next_copy = done;
    }
    merge<VECTORS>(own, column, shape.dim_v, sums);
    const int quads = shape.dim_v / 4;
    for (int i = threadIdx.x; i < unit.count * quads; i += SPLIT_THREADS) {
        const int vector = i / quads;
        const i64 place = place_of(unit, vector, shape.n_head) * gridDim.y + blockIdx.y;
        float* result = results + place * (shape.dim_v + EXTRA);
        four_at(result + i % quads * 4) = four_at(sums + i * 4);
        if (i % quads == 0) {
            result[shape.dim_v] = softmax.peaks[vector];
            result[shape.dim_v + 1] = softmax.totals[vector];
        }
    }
}

// The result of one row and head. Every warp finds out the peak and the total; a column's threads have some splits each.
DEVICE void combine(const float* results, const i64* blocks, int n_head, int dim_v, int window, int splits, float* out) {
    const i64* block = blocks + blockIdx.z * BLOCK_COLUMNS;
    const int row = blockIdx.y, pos = static_cast<int>(block[BLOCK_POS]), at = pos + row, width = dim_v + EXTRA;
    if (row >= block[BLOCK_ROWS]) return;
    const int first = first_key(at, window) / SPLIT, count = at / SPLIT - first + 1;
    const i64 place = (block[BLOCK_START] + row) * n_head + blockIdx.x;
    const float* result = results + (place * splits + first - first_key(pos, window) / SPLIT) * width;

    float peak = negative_infinity(), total = 0.f;
    for (int i = lane_id(); i < count; i += WARP) peak = max(peak, result[i * width + dim_v]);
    peak = warp_largest(peak);
    for (int i = lane_id(); i < count; i += WARP)
        total = __fmaf_rn(exp_of_negative(result[i * width + dim_v] - peak), result[i * width + dim_v + 1], total);
    total = warp_sum(total);

    __shared__ float4 sums[COMBINE_THREADS];
    const Column column = own_column(dim_v / 4);
    float4 own = {};
    for (int i = column.lane; i < count; i += column.lanes)
        multiply_add(own, exp_of_negative(result[i * width + dim_v] - peak), four_at(result + i * width + column.index * 4));
    sums[threadIdx.x] = own;
    __syncthreads();
    if (column.lane) return;
    for (int lane = 1; lane < column.lanes; ++lane) own = plus(own, sums[threadIdx.x + lane * (dim_v / 4)]);
    four_at(out + place * dim_v + column.index * 4) = scaled(own, 1.f / total);
}

}  // namespace attention
