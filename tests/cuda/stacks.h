// Stacks that give each other the CPU: a fiber is a place in the program, left when another one is entered.
#pragma once
#include <stddef.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace fibers {

constexpr size_t stack_bytes = 64 * 1024;
void run_threads();  // what every fiber executes

#if defined(__x86_64__) && !defined(FIBERS_UCONTEXT)

struct Context { void** top; };

// Leaves on the stack what a called function has to preserve, and continues where the other stack was left.
extern "C" __attribute__((visibility("hidden"))) void fibers_swap(void*** left, void** entered);
asm(R"(
    .pushsection .text
    .hidden fibers_swap
    .globl fibers_swap
    .type fibers_swap, @function
fibers_swap:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fibers_swap, .-fibers_swap
    .popsection
)");

inline void swap(Context& left, Context& entered) { fibers_swap(&left.top, entered.top); }

/** The next swap to it enters `run_threads`, which must find its stack as after a call: 8 past a multiple of 16. */
inline void prepare(Context& context, void* stack) {
    context.top = static_cast<void**>(stack) + stack_bytes / sizeof(void*) - 8;
    std::fill_n(context.top, 8, nullptr);  // six registers, the entry, and no return address
    context.top[6] = reinterpret_cast<void*>(run_threads);
}

#else

struct Context { ucontext_t state; };

inline void swap(Context& left, Context& entered) { swapcontext(&left.state, &entered.state); }

inline void prepare(Context& context, void* stack) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack;
    context.state.uc_stack.ss_size = stack_bytes;
    context.state.uc_link = nullptr;
    makecontext(&context.state, run_threads, 0);
}

#endif

struct Fiber {
    Context context;
    void* stack;  // its lowest address
    size_t bytes;
    void* asan_frames;
};

inline Fiber launcher;  // what called into the library, on a stack of its own
inline Fiber *running = &launcher, *left_last;

#if defined(__SANITIZE_ADDRESS__)
inline void before_switch(Fiber& from, Fiber& to) { __sanitizer_start_switch_fiber(&from.asan_frames, to.stack, to.bytes); }
/** Also learns where the launcher's stack is, which may be another one at every launch. */
inline void after_switch() {
    const void* stack;
    __sanitizer_finish_switch_fiber(running->asan_frames, &stack, &left_last->bytes);
    left_last->stack = const_cast<void*>(stack);
}
inline void forget_frames(Fiber& fiber) { __asan_unpoison_memory_region(fiber.stack, fiber.bytes); }
/** Fills variables and the gaps between them, which `memset` may not touch. */
__attribute__((no_sanitize_address)) inline void fill_unwatched(unsigned char* from, unsigned char* to, int value) {
    for (volatile unsigned char* byte = from; byte < to; ++byte) *byte = value;
}
#else
inline void before_switch(Fiber&, Fiber&) {}
inline void after_switch() {}
inline void forget_frames(Fiber&) {}
inline void fill_unwatched(unsigned char* from, unsigned char* to, int value) { std::fill(from, to, value); }
#endif

inline void switch_to(Fiber& next) {
    left_last = running;
    running = &next;
    before_switch(*left_last, next);
    swap(left_last->context, next.context);
    after_switch();
}

/** A new stack's lowest address, the page below it out of bounds; null when there is no memory. */
inline void* new_stack() {
    size_t page = sysconf(_SC_PAGESIZE);
    void* base = mmap(nullptr, page + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED || mprotect(base, page, PROT_NONE)) return nullptr;
    return static_cast<unsigned char*>(base) + page;
}

inline std::deque<Fiber> all_fibers;
inline std::vector<Fiber*> idle_fibers;  // those that wait in `run_threads`, or before it, for a thread

inline void make_idle(Fiber& fiber) {
    forget_frames(fiber);
    fiber.asan_frames = nullptr;
    prepare(fiber.context, fiber.stack);
    idle_fibers.push_back(&fiber);
}

/** Has a fiber for each of `count` threads; false when there is no memory. */
inline bool provide_fibers(size_t count) {
    while (all_fibers.size() < count) {
        void* stack = new_stack();
        if (!stack) return false;
        make_idle(all_fibers.emplace_back(Fiber{{}, stack, stack_bytes, nullptr}));
    }
    return true;
}

/** Takes back the fibers of a failed launch, whatever they were doing. */
inline void recall_fibers() {
    idle_fibers.clear();
    for (Fiber& fiber : all_fibers) make_idle(fiber);
}

}  // namespace fibers
