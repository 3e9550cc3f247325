// Executes CUDA C++ kernels on the CPU: `g++ -include fibers.h` in front of a kernel source, then FIBERS_EXPORT(kernel).
//
// A block's threads take turns on one OS thread, each until it has to wait for others; one that waits keeps its stack (a
// fiber), one that never waits hands its stack to the next. Blocks run one after the other, so waiting for another block
// never ends. The order of turns is chosen at the launch: a kernel whose result depends on it lacks a barrier.
#pragma once
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "stacks.h"

// ---- The language ---------------------------------------------------------------------------------------------------

#define CUDA_ON_CPU 1
#define __global__
#define __device__
#define __host__
#define __constant__ __attribute__((unused))
#define __align__(bytes) alignas(bytes)
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// g++ would keep a restricted pointer's data in registers across a barrier, where nvcc reads it again.
#define __restrict__
// A section of their own lets every block begin with garbage in all of them. (Not in those of templates: there g++ ignores it.
// In an inline function that is not static it refuses it.)
#define __shared__ static __attribute__((section("fibers_shared")))

struct uint3 { unsigned x, y, z; };
struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define FIBERS_VECTORS(scalar, name)                                                                                      \
    struct alignas(8) name##2 { scalar x, y; };                                                                           \
    struct alignas(16) name##4 { scalar x, y, z, w; };                                                                    \
    inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                                                  \
    inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
FIBERS_VECTORS(int, int)
FIBERS_VECTORS(unsigned, uint)
FIBERS_VECTORS(float, float)
#undef FIBERS_VECTORS

constexpr int warpSize = 32;
inline uint3 threadIdx, blockIdx;  // of the thread whose turn it is
inline dim3 blockDim, gridDim;

extern "C" __attribute__((weak, visibility("hidden"))) unsigned char __start_fibers_shared[], __stop_fibers_shared[];

namespace fibers {

// ---- A block and its threads ----------------------------------------------------------------------------------------

constexpr unsigned lanes = 32, most_threads = 1024, most_warps = most_threads / lanes;
constexpr int garbage = 0xCD;
enum class Primitive { sync, shuffle, vote };

struct Call {  // of a lane that waits for the others in `mask` to call the same primitive
    unsigned mask;
    Primitive primitive;
    unsigned source;  // of a shuffle: the lane whose value is wanted
    uint64_t value, result;
};

struct Warp {
    unsigned ready, at_warp, at_block;  // sets of lanes, one bit each: waiting for a turn, for the warp, for the block
    unsigned turn;                      // place in `lane_order` of the lane that had the last turn
    Call calls[lanes];
};

struct Thread {
    uint3 index;
    Fiber* fiber;
};

struct Barrier { unsigned arrived, votes; };

inline void (*kernel)(void**);
inline void** arguments;
inline unsigned char* dynamic_shared;
inline Warp warps[most_warps];
inline Thread threads[most_threads];  // thread i is lane i % 32 of warp i / 32
inline unsigned warp_order[most_warps], lane_order[lanes];  // in which they get turns, round and round
inline unsigned thread_count, warp_count, warp_turn, current, finished;  // `current`: the thread whose turn it is
inline Barrier barrier, opened;  // the one that threads arrive at, and the last that all of them passed
inline char error[512];

/** The block's dynamic shared memory, as `extern __shared__` names it in CUDA. */
inline void* shared() { return dynamic_shared; }

inline unsigned lane() { return current % lanes; }
inline Warp& warp() { return warps[current / lanes]; }

/** Ends the launch: its other threads never run again. */
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    int start = snprintf(error, sizeof error, "block (%u, %u, %u): ", blockIdx.x, blockIdx.y, blockIdx.z);
    va_list values;
    va_start(values, format);
    vsnprintf(error + start, sizeof error - start, format, values);
    va_end(values);
    switch_to(launcher);
    __builtin_unreachable();
}

template <class Function> void for_lanes(unsigned mask, Function function) {
    for (; mask; mask &= mask - 1) function(__builtin_ctz(mask));
}

/** The lanes that have made this call. */
inline unsigned callers(const Warp& warp, const Call& call) {
    unsigned found = 0;
    for_lanes(warp.at_warp & call.mask, [&](unsigned lane) {
        const Call& other = warp.calls[lane];
        if (other.mask == call.mask && other.primitive == call.primitive) found |= 1u << lane;
    });
    return found;
}

/** Whom a lane of this warp waits for in vain. */
inline void explain(const Warp& warp, char* text, size_t size) {
    unsigned lane = __builtin_ctz(warp.at_warp), elsewhere = warp.at_warp | warp.at_block;
    const Call& call = warp.calls[lane];
    unsigned missing = call.mask & ~callers(warp, call);
    snprintf(text, size, "; lane %u of warp %d gave mask 0x%08x: of it lanes 0x%08x wait elsewhere and 0x%08x are gone", lane,
             int(&warp - warps), call.mask, missing & elsewhere, missing & ~elsewhere);
}

[[noreturn]] inline void deadlock() {
    unsigned at_block = 0, at_warp = 0;
    char why[256] = "";
    for (const Warp& warp : warps) {
        at_block += __builtin_popcount(warp.at_block);
        at_warp += __builtin_popcount(warp.at_warp);
        if (warp.at_warp && !*why) explain(warp, why, sizeof why);
    }
    fail("deadlock: of %u threads %u wait at __syncthreads, %u at a warp primitive and %u have exited%s", thread_count,
         at_block, at_warp, finished, why);
}

// ---- Turns ----------------------------------------------------------------------------------------------------------

inline unsigned next_lane(Warp& warp) {
    do warp.turn = (warp.turn + 1) % lanes;
    while (!(warp.ready >> lane_order[warp.turn] & 1));
    return lane_order[warp.turn];
}

/** The thread to run next: of the same warp while one of it is ready; `thread_count` when none is. */
inline unsigned next_thread() {
    for (unsigned step = 0; step < warp_count; ++step, warp_turn = (warp_turn + 1) % warp_count) {
        unsigned number = warp_order[warp_turn];
        if (warps[number].ready) return number * lanes + next_lane(warps[number]);
    }
    return thread_count;
}

/** Gives the turn to others, until one of them gives it back to this fiber. */
inline void wait() {
    unsigned next = next_thread();
    if (next == thread_count) deadlock();
    Thread& thread = threads[next];
    if (!thread.fiber) {
        thread.fiber = idle_fibers.back();
        idle_fibers.pop_back();
    }
    current = next;
    threadIdx = thread.index;
    if (thread.fiber != running) switch_to(*thread.fiber);
}

/** Lets the block's threads pass once all have arrived or exited; false until then. */
inline bool open_barrier() {
    if (!barrier.arrived || barrier.arrived + finished < thread_count) return false;
    for (Warp& warp : warps) warp.ready |= std::exchange(warp.at_block, 0);
    opened = std::exchange(barrier, {});
    return true;
}

/** `__syncthreads`: how many threads arrived, and how many of them with a true vote. */
inline Barrier sync_block(bool vote) {
    ++barrier.arrived;
    barrier.votes += vote;
    warp().ready &= ~(1u << lane());
    warp().at_block |= 1u << lane();
    if (!open_barrier()) wait();
    return opened;
}

inline void finish_thread() {
    warp().ready &= ~(1u << lane());
    ++finished;
    open_barrier();
    idle_fibers.push_back(running);
    if (finished == thread_count) switch_to(launcher);
    else wait();
}

inline void run_threads() {
    after_switch();
    for (;;) {
        kernel(arguments);
        finish_thread();
    }
}

// ---- Warp primitives ------------------------------------------------------------------------------------------------

inline bool is_complete(const Warp& warp, const Call& call) {
    return (warp.at_warp & call.mask) == call.mask && callers(warp, call) == call.mask;
}

/** Gives each lane of a complete call its result, and all of them the turn. */
inline void deliver(Warp& warp, unsigned mask, Primitive primitive) {
    uint64_t ballot = 0, nothing;
    memset(&nothing, garbage, sizeof nothing);
    for_lanes(mask, [&](unsigned lane) { ballot |= warp.calls[lane].value << lane; });
    for_lanes(mask, [&](unsigned lane) {
        Call& call = warp.calls[lane];
        bool given = mask >> call.source & 1;
        call.result = primitive == Primitive::vote ? ballot : given ? warp.calls[call.source].value : nothing;
    });
    warp.at_warp &= ~mask;
    warp.ready |= mask;
}

/** Calls `primitive` with the other lanes of `mask`, however late they come. */
inline uint64_t meet(Primitive primitive, unsigned mask, uint64_t value = 0, unsigned source = 0) {
    Warp& warp = fibers::warp();
    unsigned lane = fibers::lane();
    if (!(mask >> lane & 1)) fail("lane %u of warp %u is not in its mask 0x%08x", lane, current / lanes, mask);
    Call& call = warp.calls[lane] = {mask, primitive, source, value, 0};
    warp.ready &= ~(1u << lane);
    warp.at_warp |= 1u << lane;
    if (is_complete(warp, call)) deliver(warp, mask, primitive);
    else wait();
    return call.result;
}

template <class T> T shuffle(unsigned mask, T value, unsigned source) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = meet(Primitive::shuffle, mask, bits, source);
    memcpy(&value, &bits, sizeof value);
    return value;
}

struct Segment { unsigned first, last; };

/** The lanes among which a shuffle of this width stays. */
inline Segment segment(int width) {
    if (width < 1 || width > warpSize || width & (width - 1)) fail("a shuffle of width %d", width);
    return {lane() & ~(width - 1u), lane() | (width - 1u)};
}

// ---- Launching ------------------------------------------------------------------------------------------------------

enum Order { ascending, reversed, shuffled };

/** Fills [first, last) with 0, 1, ... in the given order. */
inline void arrange(unsigned* first, unsigned* last, int order, std::minstd_rand& random) {
    std::iota(first, last, 0u);
    if (order == reversed) std::reverse(first, last);
    if (order == shuffled) std::shuffle(first, last, random);
}

inline void number_threads() {
    for (unsigned i = 0; i < thread_count; ++i)
        threads[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
}

/** Makes all threads of a block wait for their first turn. */
inline void begin_threads() {
    for (unsigned i = 0; i < thread_count; ++i) threads[i].fiber = nullptr;
    for (unsigned i = 0; i < most_warps; ++i) {
        int count = std::clamp(int(thread_count) - int(i * lanes), 0, int(lanes));
        warps[i].ready = (uint64_t(1) << count) - 1;
        warps[i].at_warp = warps[i].at_block = 0;
        warps[i].turn = lanes - 1;
    }
    barrier = {};
    warp_turn = finished = 0;
}

inline void run_block(unsigned number, size_t shared_bytes, int order, std::minstd_rand& random) {
    blockIdx = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
    arrange(warp_order, warp_order + warp_count, order, random);
    arrange(lane_order, lane_order + lanes, order, random);
    memset(dynamic_shared, garbage, shared_bytes);
    fill_unwatched(__start_fibers_shared, __stop_fibers_shared, garbage);
    begin_threads();
    wait();
}

/** Runs all blocks; false, with `error` said, when a block could not finish. */
inline bool run_blocks(size_t shared_bytes, int order) {
    std::minstd_rand random(1);
    std::vector<unsigned> block_order(size_t(gridDim.x) * gridDim.y * gridDim.z);
    arrange(block_order.data(), block_order.data() + block_order.size(), order, random);
    for (unsigned number : block_order) {
        run_block(number, shared_bytes, order, random);
        if (*error) return false;
    }
    return true;
}

/** Why there can be no such launch, on a GPU either; empty when there can. */
inline const char* refusal(dim3 grid, dim3 block, int order) {
    if (order < ascending || order > shuffled) return "an order is 0, 1 or 2";
    if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z) return "a grid or block of no threads";
    if (grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) return "a grid has at most 2^31 - 1, 65535 and 65535 blocks";
    if (uint64_t(block.x) * block.y * block.z > most_threads || block.z > 64)
        return "a block has at most 1024 threads, z at most 64";
    return "";
}

/** As large as asked for and not a byte more, so that AddressSanitizer sees what lies beyond; null when there is no memory. */
inline void* new_shared(size_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, 128, bytes) ? nullptr : memory;
}

/** Launches a kernel and waits for it: 0, or 1 with `error` said. One launch at a time, from any thread. */
inline int launch(void (*run)(void**), void** values, dim3 grid, dim3 block, size_t shared_bytes, int order) {
    snprintf(error, sizeof error, "%s", refusal(grid, block, order));
    if (*error) return 1;
    kernel = run;
    arguments = values;
    gridDim = grid;
    blockDim = block;
    thread_count = block.x * block.y * block.z;
    warp_count = (thread_count + lanes - 1) / lanes;
    std::unique_ptr<void, decltype(&free)> memory(new_shared(shared_bytes), free);
    if (!memory || !provide_fibers(thread_count)) {
        snprintf(error, sizeof error, "no memory for a block");
        return 1;
    }
    dynamic_shared = static_cast<unsigned char*>(memory.get());
    number_threads();
    if (run_blocks(shared_bytes, order)) return 0;
    recall_fibers();
    return 1;
}

// ---- Exporting ------------------------------------------------------------------------------------------------------

/** NumPy's letter for a parameter's type, `P` for a pointer. */
template <class T> constexpr char letter() {
    static_assert(std::is_pointer_v<T> || std::is_arithmetic_v<T>, "a kernel takes pointers and numbers");
    if (std::is_pointer_v<T>) return 'P';
    if (std::is_same_v<T, bool>) return '?';
    if (std::is_floating_point_v<T>) return sizeof(T) == 4 ? 'f' : 'd';
    return (std::is_signed_v<T> ? "bh_i___q" : "BH_I___Q")[sizeof(T) - 1];
}

template <class... P> const char* letters(void (*)(P...)) {
    static const char text[] = {letter<P>()..., 0};
    return text;
}

template <class... P, size_t... i> void call(void (*kernel)(P...), void** values, std::index_sequence<i...>) {
    kernel(*static_cast<P*>(values[i])...);
}

template <class... P> void call(void (*kernel)(P...), void** values) {
    call(kernel, values, std::index_sequence_for<P...>());
}

}  // namespace fibers

#define FIBERS_PUBLIC extern "C" __attribute__((visibility("default")))

/** Makes a kernel callable from outside: `values` are its arguments' addresses. */
#define FIBERS_EXPORT(name)                                                                                              \
    FIBERS_PUBLIC int name##__cpu(void** values, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,        \
                                  unsigned bz, size_t shared_bytes, int order) {                                         \
        return fibers::launch([](void** values) { fibers::call(name, values); }, values, {gx, gy, gz}, {bx, by, bz},     \
                              shared_bytes, order);                                                                      \
    }                                                                                                                    \
    FIBERS_PUBLIC const char* name##__parameters() { return fibers::letters(name); }

/** Why the last launch failed; empty when it did not. */
FIBERS_PUBLIC const char* fibers_error() { return fibers::error; }

#include "intrinsics.h"
