// Kernels that show whether `fibers.h` keeps what CUDA promises, and some that break its rules.
#define KERNEL extern "C" __global__ void
#define FULL 0xffffffffu

KERNEL record_turns(int* count, int* turns) { turns[atomicAdd(count, 1)] = blockIdx.x * blockDim.x + threadIdx.x; }

KERNEL record_indices(uint4* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    __syncthreads();
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
        make_uint4(threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z);
}

KERNEL shuffle(int kind, int by, int width, const unsigned* in, unsigned* out) {
    unsigned value = in[threadIdx.x];
    out[threadIdx.x] = kind == 0 ? __shfl_sync(FULL, value, by, width) : kind == 1 ? __shfl_xor_sync(FULL, value, by, width)
                       : kind == 2 ? __shfl_up_sync(FULL, value, by, width) : __shfl_down_sync(FULL, value, by, width);
}

// Each value comes from the lane beside: what a lane sends is its number.
KERNEL shuffle_types(int* wrong) {
    int lane = threadIdx.x % 32, other = lane ^ 1;
    signed char byte = __shfl_xor_sync(FULL, (signed char)-lane, 1);
    __half half = __shfl_xor_sync(FULL, __float2half_rn(lane), 1);
    double big = __shfl_xor_sync(FULL, 1e300 + lane * 1e290, 1);
    float2 pair = __shfl_xor_sync(FULL, make_float2(lane, -lane), 1);
    if (byte != -other || __half2float(half) != other || big != 1e300 + other * 1e290 || pair.x != other || pair.y != -other)
        atomicAdd(wrong, 1);
}

// The lower and the upper half call by themselves, and then the first four of each with others of their half still behind.
KERNEL shuffle_groups(unsigned* out) {
    int lane = threadIdx.x;
    unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u, quarter = half & 0x000f000fu, sum = 0;
    if (lane < 16) sum = __shfl_sync(half, 100u + lane, 3);
    else sum = __shfl_sync(half, 200u + lane, 20);
    if (lane % 16 < 4) sum += 1000 * __shfl_sync(quarter, lane, lane & 16);
    __syncwarp();
    out[lane] = sum + 100000 * __shfl_sync(FULL, lane, 5);
}

KERNEL shuffle_from_outside(unsigned* out) {
    if (threadIdx.x < 8) out[threadIdx.x] = __shfl_down_sync(0xffu, threadIdx.x, 4);
}

KERNEL vote(unsigned mask, unsigned yes, unsigned* out) {
    unsigned lane = threadIdx.x;
    if (!(mask >> lane & 1)) return;
    unsigned ballot = __ballot_sync(mask, yes >> lane & 1), any = __any_sync(mask, yes >> lane & 1);
    out[lane] = ballot;
    out[32 + lane] = any;
    out[64 + lane] = __all_sync(mask, (yes >> lane & 1) * 2);
}

// Threads from `stay` on have exited; of the others, those below `yes` vote.
KERNEL count_at_barrier(unsigned stay, unsigned yes, int* out) {
    unsigned i = threadIdx.x;
    if (i >= stay) return;
    out[3 * i] = __syncthreads_count(i < yes);
    out[3 * i + 1] = __syncthreads_or(i < yes);
    out[3 * i + 2] = __syncthreads_and(i < yes);
}

KERNEL block_sums(const float* in, float* sums, int barriers) {
    __shared__ float of_warps[32];
    float* values = (float*)fibers::shared();
    int i = threadIdx.x, n = blockDim.x;
    values[i] = in[blockIdx.x * n + i];
    if (barriers) __syncthreads();
    float sum = values[n - 1 - i];
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
    if (i % 32 == 0) of_warps[i / 32] = sum;
    if (barriers) __syncthreads();
    if (i == 0) {
        for (int warp = 1; warp < n / 32; ++warp) sum += of_warps[warp];
        sums[blockIdx.x] = sum;
    }
}

// Moves `n` numbers down by `by`, a block's width at a time.
KERNEL move_down(int* at, int n, int by, int barriers) {
    for (int start = 0; start < n; start += blockDim.x) {
        int i = start + threadIdx.x, value = i < n ? at[i + by] : 0;
        if (barriers) __syncthreads();
        if (i < n) at[i] = value;
        if (barriers) __syncthreads();
    }
}

KERNEL read_again(int* __restrict__ at, int* __restrict__ out) {
    int before = at[0];
    __syncthreads();
    if (threadIdx.x == 1) at[0] = before + 1;
    __syncthreads();
    out[threadIdx.x] = at[0] - before;
}

KERNEL read_unwritten(unsigned* out) {
    __shared__ unsigned fixed[8];
    __shared__ unsigned char byte;
    unsigned* dynamic = (unsigned*)fibers::shared();
    out[3 * blockIdx.x] = fixed[7];
    out[3 * blockIdx.x + 1] = dynamic[2];
    out[3 * blockIdx.x + 2] = byte;
    fixed[7] = dynamic[2] = byte = 0;
}

KERNEL add_atomically(int* i, unsigned* u, unsigned long long* q, float* f) {
    atomicAdd(i, -1);
    atomicAdd(u, 3);
    atomicAdd(q, 1ull << 32);
    atomicAdd(f, 0.5f);
}

KERNEL other_atomics(int* i, unsigned* u, long long* s, unsigned long long* q, unsigned* old) {
    int n = threadIdx.x;
    atomicMax(i, n);
    atomicMin(i + 1, -n);
    atomicMax(u, 0x80000000u + n);
    atomicMin(u + 1, 0x80000000u + n);
    atomicOr(u + 2, 1u << n % 32);
    atomicMax(s, -5 + n);
    atomicMin(s + 1, 5 - n);
    atomicMax(q, 0x8000000000000000ull + n);
    atomicMin(q + 1, 0x8000000000000000ull + n);
    atomicCAS(i + 2, n, n + 1);
    old[n] = atomicExch(u + 3, n);
}

KERNEL to_floats(const unsigned short* in, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __half2float(__ushort_as_half(in[i]));
}

KERNEL to_halves(const float* in, unsigned short* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __half_as_ushort(__float2half_rn(in[i]));
}

KERNEL to_ints(const float* in, int* toward_zero, int* nearest) {
    toward_zero[threadIdx.x] = __float2int_rz(in[threadIdx.x]);
    nearest[threadIdx.x] = __float2int_rn(in[threadIdx.x]);
}

KERNEL functions(int* bits, float* floats, double* doubles) {
    bits[0] = __popc(0xf00f);
    bits[1] = __ffs(0);
    bits[2] = __ffs(8);
    bits[3] = __clz(0);
    bits[4] = __clz(1);
    bits[5] = __float_as_int(-0.0f);
    bits[6] = __float_as_uint(__uint_as_float(0x7fc00001)) - 0x7fc00000;
    bits[7] = min(-1, 1u) == 1u && max(3, -4ll) == 3;
    floats[0] = min(__int_as_float(0x7fc00000), 2.0f);
    floats[1] = max(2.0f, 3);
    floats[2] = __fsub_rn(__fadd_rn(__fmul_rn(0.1f, 0.1f), 1.0f), __fdiv_rn(1.0f, 3.0f));
    floats[3] = __fmaf_rn(0.1f, 0.1f, -0.01f);
    floats[4] = __fsqrt_rn(2.0f);
    floats[5] = rsqrtf(4.0f) + __ldg(&floats[1]);
    doubles[0] = __dadd_rn(__dmul_rn(0.1, 0.1), -0.01);
    doubles[1] = __fma_rn(0.1, 0.1, -0.01);
    doubles[2] = __longlong_as_double(__double_as_longlong(3.0) + 1);
}

__constant__ int primes[4] = {2, 3, 5, 7};
KERNEL __launch_bounds__(4) read_constants(int* out) { out[threadIdx.x] = primes[threadIdx.x]; }

KERNEL take_all_types(
    bool a, signed char b, unsigned short c, int d, unsigned e, long long f, unsigned long g, float h, double i, double* out) {
    double values[] = {double(a), double(b), double(c), double(d), double(e), double(f), double(g), h, i};
    for (int k = 0; k < 9; ++k) out[k] = values[k];
}

KERNEL wait_apart() {
    if (threadIdx.x < 16) __syncthreads();
    else __syncwarp();
}

KERNEL wait_for_the_gone() {
    if (threadIdx.x == 3) return;
    __ballot_sync(FULL, 1);
}

KERNEL disagree_on_mask() { __any_sync(threadIdx.x == 0 ? 0x7fffffffu : FULL, 1); }
KERNEL disagree_on_primitive() {
    if (threadIdx.x % 2) __syncwarp();
    else __ballot_sync(FULL, 1);
}
KERNEL leave_itself_out() { __syncwarp(0xfffffffeu); }
KERNEL shuffle_width(int width) { __shfl_sync(FULL, 1, 0, width); }

KERNEL write_at(int* out, int i) { out[i] = 1; }
KERNEL write_shared(int i) { ((unsigned char*)fibers::shared())[i] = 1; }
KERNEL write_fixed(int i, int* out) {
    __shared__ volatile int fixed[8];
    fixed[i] = 1;
    out[0] = fixed[0];
}
KERNEL write_stack(int i, int* out) {
    volatile int local[8];
    for (int k = 0; k < 8; ++k) local[k] = k;
    __syncthreads();
    local[i] = 1;
    out[threadIdx.x] = local[threadIdx.x];
}
KERNEL read_wide(const char* at, uint4* out) { *out = *(const uint4*)at; }
KERNEL cast(float value, int* out) { *out = (int)value; }
