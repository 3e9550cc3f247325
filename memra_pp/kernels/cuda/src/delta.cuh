// The gated delta net (kernels/delta.py): short convolution, gates, recurrent scan. Sessions of a batch are ragged, as the
// table of spans says; tables hold device addresses. A session without rows is left as it is.
#pragma once
#include "rows.cuh"

enum State { STATE_CONV, STATE_NOW, STATE_NEXT, STATE_COLUMNS };
enum Capture { CAPTURE_SESSION, CAPTURE_ROWS, CAPTURE_CONV, CAPTURE_STATE, CAPTURE_COLUMNS };

constexpr int SCAN_LINKS = 16;  // products over a head's keys that are summed in one chain
constexpr float NORM_EPS = 1e-6f;

// The inputs of a block's channels: a session's rows, and before them its state's, each channel's oldest first.
struct Inputs {
    const float *x, *past;
    int width, history;
};

DEVICE float input_at(const Inputs& inputs, i64 row, int channel) {
    return row < 0 ? inputs.past[(channel + 1) * inputs.history + row] : inputs.x[row * inputs.width + channel];
}

// Writes the state after `rows` rows, of the block's channels.
DEVICE void keep_last(const Inputs& inputs, i64 rows, int channels, float* state) {
    const int threads = blockDim.x * blockDim.y;
    for (int at = threadIdx.y * blockDim.x + threadIdx.x; at < channels * inputs.history; at += threads)
        state[at] = input_at(inputs, rows + at % inputs.history - inputs.history, at / inputs.history);
}

// Silu of a causal convolution along each session's rows; its state is moved on in place, and copied where captures say.
// `weight` is `[taps, width]`. Grid: (ceil(width / 32), sessions). Block: (32, 1 to 32: rows side by side).
// Shared: 4 * 32 * (taps - 1).
KERNEL conv_silu(
    const float* __restrict__ x, int width, const float* __restrict__ weight, int taps, const i64* __restrict__ spans,
    const i64* __restrict__ states, const i64* __restrict__ captures, int n_captures, float* __restrict__ out) {
    DYNAMIC_SHARED(past);
    const int session = blockIdx.y, first = blockIdx.x * WARP, channel = threadIdx.x, history = taps - 1;
    const int channels = min(width - first, WARP);
    const i64 start = spans[session * SPAN_COLUMNS + SPAN_START], rows = spans[session * SPAN_COLUMNS + SPAN_ROWS];
    if (rows == 0) return;
    const i64 block_at = start * width + first, state_at = static_cast<i64>(first) * history;
    float* state = reinterpret_cast<float*>(states[session * STATE_COLUMNS + STATE_CONV]) + state_at;
    for (int at = threadIdx.y * WARP + channel; at < channels * history; at += WARP * blockDim.y) past[at] = state[at];
    __syncthreads();
    const Inputs inputs = {x + block_at, past, width, history};
    for (i64 row = threadIdx.y; row < rows && channel < channels; row += blockDim.y) {
        float sum = 0.f;
        for (int tap = 0; tap < taps; tap++)
            sum = __fmaf_rn(weight[tap * width + first + channel], input_at(inputs, row + tap - history, channel), sum);
        out[block_at + row * width + channel] = silu(sum);
    }
    keep_last(inputs, rows, channels, state);
    for (int i = 0; i < n_captures; i++) {
        const i64* capture = captures + i * CAPTURE_COLUMNS;
        float* copy = reinterpret_cast<float*>(capture[CAPTURE_CONV]) + state_at;
        if (capture[CAPTURE_SESSION] == session) keep_last(inputs, capture[CAPTURE_ROWS], channels, copy);
    }
}

// `beta = sigmoid(b)` and `decay = exp(-rate * softplus(a + dt_bias))`, `[rows, heads]`, computed in f64 and rounded once; `ba`
// is `[rows, 2 * heads]`, b before a. Grid: ceil(rows * heads / 256). Block: 256.
KERNEL delta_gates(
    const float* __restrict__ ba, const double* __restrict__ rate, const float* __restrict__ dt_bias, float* __restrict__ beta,
    float* __restrict__ decay, i64 rows, int heads) {
    const i64 at = thread_index();
    if (at >= rows * heads) return;
    const int head = static_cast<int>(at % heads);
    const float* of_row = ba + at / heads * 2 * heads;
    const double step = static_cast<double>(of_row[heads + head]) + static_cast<double>(dt_bias[head]);
    const double softplus = (step > 0.0 ? step : 0.0) + log1p(exp(step > 0.0 ? -step : step));
    beta[at] = static_cast<float>(sigmoid(of_row[head]));
    decay[at] = static_cast<float>(exp(-rate[head] * softplus));
}

// Each row's first `heads` heads, those of q before those of k, brought to length 1, and q divided by sqrt(d_k): `qk` is
// `[rows, heads, d_k]`, `qkv` `[rows, width]`. A warp a head. Grid: ceil(rows * heads / 8). Block: 256.
KERNEL to_length(const float* __restrict__ qkv, float* __restrict__ qk, i64 rows, int width, int heads, int d_k) {
    const i64 row = warp_index() / heads;
    const int head = static_cast<int>(warp_index() % heads);
    if (row >= rows) return;  // whole warps leave together
    const float* from = qkv + row * width + head * d_k;
    float factor = 1.f / __fsqrt_rn(sum_of_squares(from, d_k) + NORM_EPS);
    if (head < heads / 2) factor *= static_cast<float>(1.0 / sqrt(static_cast<double>(d_k)));
    for (int at = lane_id(); at < d_k; at += WARP) qk[(row * heads + head) * d_k + at] = from[at] * factor;
}

// A thread's share of a v head's state: one chain's elements of one column, `stride` apart.
struct Share {
    i64 at;
    int stride, keys;
};

DEVICE void read_share(float (&state)[SCAN_LINKS], const Share& share, i64 address) {
    const float* from = reinterpret_cast<const float*>(address) + share.at;
#pragma unroll
    for (int i = 0; i < SCAN_LINKS; i++) state[i] = i < share.keys ? from[static_cast<i64>(i) * share.stride] : 0.f;
}

DEVICE void write_share(const float (&state)[SCAN_LINKS], const Share& share, i64 address) {
    float* to = reinterpret_cast<float*>(address) + share.at;
#pragma unroll
    for (int i = 0; i < SCAN_LINKS; i++)
        if (i < share.keys) to[static_cast<i64>(i) * share.stride] = state[i];
}

// Copies of a session's state to take on the way.
struct Captures {
    const i64* table;
    int count, session;
};

// The least number of rows above `rows` after which a copy is to be taken; 0 if there is none.
DEVICE int next_capture(const Captures& captures, int rows) {
    int next = 0;
    for (int i = 0; i < captures.count; i++) {
        const i64* capture = captures.table + i * CAPTURE_COLUMNS;
        const bool later = capture[CAPTURE_SESSION] == captures.session && capture[CAPTURE_ROWS] > rows;
        if (later && (next == 0 || capture[CAPTURE_ROWS] < next)) next = static_cast<int>(capture[CAPTURE_ROWS]);
    }
    return next;
}

DEVICE void write_captured(const float (&state)[SCAN_LINKS], const Share& share, const Captures& captures, int rows) {
    for (int i = 0; i < captures.count; i++) {
        const i64* capture = captures.table + i * CAPTURE_COLUMNS;
        if (capture[CAPTURE_SESSION] == captures.session && capture[CAPTURE_ROWS] == rows)
            write_share(state, share, capture[CAPTURE_STATE]);
    }
}

// A chain's elements of q or k, 16-byte aligned in shared memory.
DEVICE void read_keys(float (&keys)[SCAN_LINKS], const float* from) {
#pragma unroll
    for (int i = 0; i < SCAN_LINKS; i += 4) {
        const float4 values = *reinterpret_cast<const float4*>(from + i);
        keys[i] = values.x, keys[i + 1] = values.y, keys[i + 2] = values.z, keys[i + 3] = values.w;
    }
}

// One chain of `k @ S`.
DEVICE float recall(const float (&state)[SCAN_LINKS], const float (&k)[SCAN_LINKS]) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SCAN_LINKS; i++) sum = __fmaf_rn(k[i], state[i], sum);
    return sum;
}

// `S = decay * S + outer(k, change)`, then one chain of `q @ S`.
DEVICE float learn(
    float (&state)[SCAN_LINKS], const float (&q)[SCAN_LINKS], const float (&k)[SCAN_LINKS], float decay, float change) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < SCAN_LINKS; i++) {
        state[i] = __fmaf_rn(k[i], change, state[i] * decay);
        sum = __fmaf_rn(q[i], state[i], sum);
    }
    return sum;
}

// A column's chains, `[chains, 32]`, added first to last.
DEVICE float sum_of_chains(const float* sums, int chains) {
    float total = NOTHING;
#pragma unroll 8
    for (int chain = 0; chain < chains; chain++) total += sums[chain * WARP];
    return total;
}

// What a thread reads of a row: an element of q or k, which it shares with the block, its column's v, and the gates.
struct ScanRow {
    float key, v, beta, decay;
};

// Where it reads that of a session's first row, and how far rows are apart. Beyond the head's keys and columns is nothing.
struct ScanInputs {
    const float *key, *v, *beta, *decay;
    int key_step, v_step, gate_step;
    bool has_key, has_column;
};

DEVICE ScanRow read_row(const ScanInputs& inputs, i64 row) {
    const float key = inputs.has_key ? inputs.key[row * inputs.key_step] : NOTHING;
    const float v = inputs.has_column ? inputs.v[row * inputs.v_step] : 0.f;
    return {key, v, inputs.beta[row * inputs.gate_step], inputs.decay[row * inputs.gate_step]};
}

// The gated delta rule over each session's rows: `S = decay * S; S += outer(k, beta * (v - k @ S)); out = q @ S`. `qk` is as of
// `to_length`, `qkv` `[rows, 2 * n_k * d_k + n_v * d_v]`, `out` `[rows, n_v * d_v]`. S is read at the table's STATE_NOW and
// written at STATE_NEXT; where a session has rows, the caller swaps the two. In between it stays in registers, a thread having
// one chain's elements of one column. Grid: (ceil(d_v / 32), n_v, sessions). Block: (32, ceil(d_k / 16)); d_k is at most 512.
// Shared: 512 * ceil(d_k / 16).
KERNEL __launch_bounds__(1024) delta_scan(
    const float* __restrict__ qk, const float* __restrict__ qkv, const float* __restrict__ beta,
    const float* __restrict__ decay, int n_k, int n_v, int d_k, int d_v, const i64* __restrict__ spans,
    const i64* __restrict__ states, const i64* __restrict__ captures, int n_captures, float* __restrict__ out) {
    DYNAMIC_SHARED(keys);  // [2, q and k, padded]: a row's and the next one's
    const int chains = blockDim.y, chain = threadIdx.y, lane = threadIdx.x, thread = chain * WARP + lane;
    const int padded = chains * SCAN_LINKS;
    float *recalled = keys + 4 * padded, *answers = recalled + chains * WARP;  // [chains, 32] each
    const int session = blockIdx.z, head = blockIdx.y, column = blockIdx.x * WARP + lane;
    const i64 start = spans[session * SPAN_COLUMNS + SPAN_START];
    const int rows = static_cast<int>(spans[session * SPAN_COLUMNS + SPAN_ROWS]);
    if (rows == 0) return;

    const int key = thread % padded, key_head = (thread < padded ? 0 : n_k) + head / (n_v / n_k);
    const int key_step = 2 * n_k * d_k, v_step = key_step + n_v * d_v;
    const bool has_column = column < d_v;
    const ScanInputs inputs = {
        qk + start * key_step + key_head * d_k + key, qkv + start * v_step + key_step + head * d_v + column,
        beta + start * n_v + head, decay + start * n_v + head, key_step, v_step, n_v, key < d_k, has_column};
    const int first = chain * SCAN_LINKS;
    const Share share = {(static_cast<i64>(head) * d_k + first) * d_v + column, d_v, has_column ? d_k - first : 0};
    const Captures copies = {captures, n_captures, session};
    const i64* addresses = states + session * STATE_COLUMNS;

    float state[SCAN_LINKS], q[SCAN_LINKS], k[SCAN_LINKS];
    read_share(state, share, addresses[STATE_NOW]);
    ScanRow next = read_row(inputs, 0);
    keys[thread] = next.key;
    __syncthreads();
    int due = next_capture(copies, 0);
    for (int row = 0; row < rows; row++) {
        const ScanRow now = next;
        if (row + 1 < rows) next = read_row(inputs, row + 1);
        const float* row_keys = keys + (row & 1) * 2 * padded + first;
        read_keys(k, row_keys + padded);
        recalled[thread] = recall(state, k);
        __syncthreads();
        const float change = __fmaf_rn(-now.decay, sum_of_chains(recalled + lane, chains), now.v) * now.beta;
        read_keys(q, row_keys);
        answers[thread] = learn(state, q, k, now.decay, change);
        keys[(~row & 1) * 2 * padded + thread] = next.key;
        __syncthreads();
        if (chain == 0 && has_column) out[((start + row) * n_v + head) * d_v + column] = sum_of_chains(answers + lane, chains);
        if (row + 1 != due) continue;
        write_captured(state, share, copies, due);
        due = next_capture(copies, due);
    }
    write_share(state, share, addresses[STATE_NEXT]);
}
