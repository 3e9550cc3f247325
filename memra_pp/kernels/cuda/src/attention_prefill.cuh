// Attention for many rows: a tile of stored rows is unpacked once and used by some dozens of query vectors.
#pragma once
#include "attention_tiles.cuh"

namespace attention {

constexpr int PREFILL_WARPS = 8, PREFILL_THREADS = PREFILL_WARPS * WARP;
constexpr int PAD = 16;                // vectors come in multiples of it
constexpr int STAGGER = 16;            // elements between unpacked rows of K: two rows side by side share no bank
constexpr int WEIGHTS_ROW = TILE + 4;  // elements from one vector's weights to the next's

// Unpacks the rows [first, last) of a tile, `stride` elements apart.
template <int CODE>
DEVICE void unpack_as(const Stored& rows, const u8* copy, int tile, int first, int last, int blocks, float* to, int stride) {
    const int reader = threadIdx.x % READERS, half = reader / 4, quad = reader % 4;
    for (int key = first - tile + threadIdx.x / READERS; key < last - tile; key += PREFILL_THREADS / READERS) {
        const u8* row = copied_row(rows, copy, tile, key);
        for (int block = 0; block < blocks; ++block)
            four_at(to + key * stride + block * 32 + reader * 4) = quad_at<CODE>(row + block * block_bytes(CODE), half, quad);
    }
}

DEVICE void unpack_rows(const Stored& rows, const u8* copy, int tile, int first, int last, int blocks, float* to, int stride) {
    WITH_FORMAT(rows.code, unpack_as<FORMAT>(rows, copy, tile, first, last, blocks, to, stride))
}

// From `N` partial sums to half as many, added to those of the lane `bit` apart: the lower lane of a pair keeps the first half.
template <int N>
DEVICE void fold(float4* sums, int bit) {
    const bool upper = lane_id() & bit;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const float4 kept = upper ? sums[i + N / 2] : sums[i], given = upper ? sums[i] : sums[i + N / 2];
        sums[i].x = kept.x + __shfl_xor_sync(ALL_LANES, given.x, bit);
        sums[i].y = kept.y + __shfl_xor_sync(ALL_LANES, given.y, bit);
        sums[i].z = kept.z + __shfl_xor_sync(ALL_LANES, given.z, bit);
        sums[i].w = kept.w + __shfl_xor_sync(ALL_LANES, given.w, bit);
    }
}

// Scaled dot products of all vectors and keys. A warp has 8 vectors and 16 keys at a time: four lanes share four of each, and
// of the 16 partial sums that make a dot product on the CPU a lane has four.
DEVICE void score_tile(const float* queries, int vectors, int dim, const float* keys, float scale, float* scores) {
    const int lane = lane_id(), share = lane % 4;
    for (int part = warp_id(); part < vectors / 4; part += PREFILL_WARPS) {
        const int vector = part / 2 * 8 + lane / 16 * 4, key = part % 2 * 16 + lane / 4 % 4;
        const float* query = queries + vector * dim;
        const float* from = keys + key * (dim + STAGGER);
        float4 sums[16] = {};
        for (int at = 4 * share; at < dim; at += 16) {
            float4 own_queries[4], own_keys[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                own_queries[i] = four_at(query + i * dim + at);
                own_keys[i] = four_at(from + 4 * i * (dim + STAGGER) + at);
            }
#pragma unroll
            for (int i = 0; i < 16; ++i) multiply_add(sums[i], own_queries[i / 4], own_keys[i % 4]);
        }
        fold<16>(sums, 2);
        fold<8>(sums, 1);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            scores[(vector + share) * WEIGHTS_ROW + key + 4 * i] = ((sums[i].x + sums[i].z) + (sums[i].y + sums[i].w)) * scale;
    }
}

// Adds the weighted values of a tile that four vectors see whole, key by key. `weights` and `values` are those of the first.
DEVICE void add_whole(float4 (&sums)[4], const float* weights, const float* values, int dim) {
    for (int key = 0; key < TILE; key += 4) {
        float4 own[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = four_at(weights + i * WEIGHTS_ROW + key);
#pragma unroll
        for (int next = 0; next < 4; ++next) {
            const float4 value = four_at(values + (key + next) * dim);
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply_add(sums[i], element(own[i], next), value);
        }
    }
}

// The same of a tile that they see in part: a weight of 0 is not enough, since the value may be a NaN.
DEVICE void add_seen(float4 (&sums)[4], const int2* seen, const float* weights, const float* values, int dim) {
    for (int key = 0; key < TILE; ++key)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (sees(seen[i], key)) multiply_add(sums[i], weights[i * WEIGHTS_ROW + key], four_at(values + key * dim));
}

// Decays the sums and adds a tile. A warp has 16 vectors and 32 elements at a time, a thread four of each.
DEVICE void add_values(const Softmax& softmax, const float* weights, int vectors, const float* values, int dim, float* sums) {
    const int lane = lane_id(), columns = dim / 32;
    for (int part = warp_id(); part < vectors / PAD * columns; part += PREFILL_WARPS) {
        const int vector = part / columns * PAD + lane / 8 * 4, at = part % columns * 32 + lane % 8 * 4;
        const int2* seen = softmax.seen + vector;
        float4 own[4];
        bool whole = true;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            whole = whole && seen[i].x == 0 && seen[i].y == TILE;
            own[i] = scaled(four_at(sums + (vector + i) * dim + at), softmax.decays[vector + i]);
        }
        if (whole) add_whole(own, weights + vector * WEIGHTS_ROW, values + at, dim);
        else add_seen(own, seen, weights + vector * WEIGHTS_ROW, values + at, dim);
#pragma unroll
        for (int i = 0; i < 4; ++i) four_at(sums + (vector + i) * dim + at) = own[i];
    }
}

DEVICE void prefill(
    const float* q, const i64* planes, const i64* bases, const i64* blocks, const Shape& shape, float scale, float* out) {
    // A session's last rows have the most to do: they go first.
    const Unit unit = unit_of(blocks + (gridDim.x - 1 - blockIdx.x) * BLOCK_COLUMNS, blockIdx.y, shape);
    const Stored k = stored_k(planes, bases, shape, unit), v = stored_v(planes, bases, shape, unit);
    const int vectors = (unit.count + PAD - 1) / PAD * PAD;
    DYNAMIC_SHARED(shared);
    float* queries = shared;
    float* sums = queries + vectors * shape.dim_k;
    float* rows = sums + vectors * shape.dim_v;  // unpacked, of K and then of V
    float* weights = rows + TILE * max(shape.dim_k + STAGGER, shape.dim_v);
    const Softmax softmax = softmax_at(weights + vectors * WEIGHTS_ROW, vectors);
    u8* copy = reinterpret_cast<u8*>(weights + vectors * (WEIGHTS_ROW + SOFTMAX));

    load_queries(q, unit, shape, vectors, queries, shape.dim_k, 4);
    for (int i = threadIdx.x; i < vectors * shape.dim_v; i += PREFILL_THREADS) sums[i] = 0.f;
    begin(softmax, unit, vectors);
    copy_tile(k, v, unit.first, unit.end, copy);
    for (int tile = unit.first / TILE * TILE; tile < unit.end; tile += TILE) {
        const int first = max(unit.first, tile), last = min(unit.end, tile + TILE);
        wait_for_copies();
        __syncthreads();  // the tile is there, and the one before is done with
        unpack_rows(k, copy, tile, first, last, shape.dim_k / 32, rows, shape.dim_k + STAGGER);
        __syncthreads();
        score_tile(queries, vectors, shape.dim_k, rows, scale, weights);
        __syncthreads();
        unpack_rows(v, copy + TILE * k.room, tile, first, last, shape.dim_v / 32, rows, shape.dim_v);
        for (int vector = warp_id(); vector < unit.count; vector += PREFILL_WARPS) {
            float& weight = weights[vector * WEIGHTS_ROW + lane_id()];
            weight = weigh(softmax, vector, tile, shape.window, weight);
        }
        __syncthreads();
        copy_tile(k, v, tile + TILE, unit.end, copy);
        add_values(softmax, weights, vectors, rows, shape.dim_v, sums);
    }
    __syncthreads();
    const int quads = shape.dim_v / 4;
    for (int i = threadIdx.x; i < unit.count * quads; i += PREFILL_THREADS) {
        const i64 to = place_of(unit, i / quads, shape.n_head) * shape.dim_v + i % quads * 4;
        four_at(out + to) = scaled(four_at(sums + i * 4), 1.f / softmax.totals[i / quads]);
    }
}

}  // namespace attention
