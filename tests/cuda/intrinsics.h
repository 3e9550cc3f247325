// The functions that CUDA gives to kernels, on top of `fibers`.
#pragma once

// ---- Barriers, shuffles and votes -----------------------------------------------------------------------------------

inline void __syncthreads() { fibers::sync_block(false); }
inline int __syncthreads_count(int vote) { return fibers::sync_block(vote).votes; }
inline int __syncthreads_or(int vote) { return fibers::sync_block(vote).votes != 0; }
inline int __syncthreads_and(int vote) {
    fibers::Barrier all = fibers::sync_block(vote);
    return all.votes == all.arrived;
}

inline void __syncwarp(unsigned mask = 0xffffffff) { fibers::meet(fibers::Primitive::sync, mask); }

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = warpSize) {
    return fibers::shuffle(mask, value, fibers::segment(width).first + (source & (width - 1)));
}

/** A lane beyond the segment is not asked: the own value comes back. A lane before it is. */
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
    unsigned own = fibers::lane(), source = own ^ (bits & 31);
    return fibers::shuffle(mask, value, source > fibers::segment(width).last ? own : source);
}

template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    unsigned own = fibers::lane();
    return fibers::shuffle(mask, value, own < fibers::segment(width).first + (delta & 31) ? own : own - (delta & 31));
}

template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
    unsigned own = fibers::lane(), source = own + (delta & 31);
    return fibers::shuffle(mask, value, source > fibers::segment(width).last ? own : source);
}

inline unsigned __ballot_sync(unsigned mask, int vote) { return fibers::meet(fibers::Primitive::vote, mask, vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) != 0; }
inline int __all_sync(unsigned mask, int vote) { return __ballot_sync(mask, vote) == mask; }

// ---- Atomics: a turn is not interrupted, so they need no more than the right result ----------------------------------

namespace fibers {

template <class T, class... Types> constexpr bool is_one_of = (std::is_same_v<T, Types> || ...);
/** CUDA has 64-bit atomics for this type alone: `unsigned long` is another one. */
using u64 = unsigned long long;
/** An argument that is converted to the memory's type, as with CUDA's overloads. */
template <class T> using Given = std::common_type_t<T>;

}  // namespace fibers

template <class T> T atomicAdd(T* at, fibers::Given<T> value) {
    static_assert(fibers::is_one_of<T, int, unsigned, fibers::u64, float, double>);
    T sum;
    if constexpr (std::is_floating_point_v<T>) sum = *at + value;
    else __builtin_add_overflow(*at, value, &sum);  // wraps
    return std::exchange(*at, sum);
}

template <class T> T atomicMax(T* at, fibers::Given<T> value) {
    static_assert(fibers::is_one_of<T, int, unsigned, long long, fibers::u64>);
    return std::exchange(*at, *at < value ? value : *at);
}

template <class T> T atomicMin(T* at, fibers::Given<T> value) {
    static_assert(fibers::is_one_of<T, int, unsigned, long long, fibers::u64>);
    return std::exchange(*at, value < *at ? value : *at);
}

template <class T> T atomicOr(T* at, fibers::Given<T> bits) {
    static_assert(fibers::is_one_of<T, int, unsigned, fibers::u64>);
    return std::exchange(*at, *at | bits);
}

template <class T> T atomicExch(T* at, fibers::Given<T> value) {
    static_assert(fibers::is_one_of<T, int, unsigned, fibers::u64, float>);
    return std::exchange(*at, value);
}

template <class T> T atomicCAS(T* at, fibers::Given<T> expected, fibers::Given<T> value) {
    static_assert(fibers::is_one_of<T, int, unsigned, fibers::u64>);
    return std::exchange(*at, *at == expected ? value : *at);
}

// ---- Bits -----------------------------------------------------------------------------------------------------------

namespace fibers {

template <class To, class From> To bits_as(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

}  // namespace fibers

inline unsigned __float_as_uint(float value) { return fibers::bits_as<unsigned>(value); }
inline int __float_as_int(float value) { return fibers::bits_as<int>(value); }
inline float __uint_as_float(unsigned bits) { return fibers::bits_as<float>(bits); }
inline float __int_as_float(int bits) { return fibers::bits_as<float>(bits); }
inline long long __double_as_longlong(double value) { return fibers::bits_as<long long>(value); }
inline double __longlong_as_double(long long bits) { return fibers::bits_as<double>(bits); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }

template <class T> T __ldg(const T* at) { return *at; }

// ---- Numbers --------------------------------------------------------------------------------------------------------

/** Toward zero; beyond an int to the nearest one, NaN to 0. A cast's result differs between processors. */
inline int __float2int_rz(float value) {
    if (value != value) return 0;
    if (value >= 0x1p31f) return INT32_MAX;
    if (value < -0x1p31f) return INT32_MIN;
    return static_cast<int>(value);
}

/** To nearest, ties to even; else as `__float2int_rz`. */
inline int __float2int_rn(float value) { return __float2int_rz(rintf(value)); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

/** Rounded twice, where a GPU is off by up to 2 ulp. A macro, since newer C libraries have a function of this name. */
#define rsqrtf(x) (1.0f / sqrtf(x))

/** Of two numbers; of a number and a NaN the number. */
template <class A, class B> constexpr std::common_type_t<A, B> min(A a, B b) {
    if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return fmin(a, b);
    else return std::min<std::common_type_t<A, B>>(a, b);
}

template <class A, class B> constexpr std::common_type_t<A, B> max(A a, B b) {
    if constexpr (std::is_floating_point_v<std::common_type_t<A, B>>) return fmax(a, b);
    else return std::max<std::common_type_t<A, B>>(a, b);
}

// ---- Half precision -------------------------------------------------------------------------------------------------

struct __half { unsigned short bits; };

inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

/** To nearest, ties to even; every NaN becomes 0x7fff, as on a GPU. */
inline __half __float2half_rn(float value) {
    unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return {0x7fff};
    unsigned half;
    if (size >= 0x47800000) half = 0x7c00;  // 2^16 and more
    // Below 2^-14 halves are multiples of 2^-24: so are floats next to 0.5, and the addition rounds.
    else if (size < 0x38800000) half = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000;
    // The exponent's bias changes from 127 to 15, and 13 bits of the mantissa are rounded away; a carry may reach infinity.
    else half = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    return {static_cast<unsigned short>(sign | half)};
}

/** Exact; every NaN becomes 0x7fffffff, as on a GPU. */
inline float __half2float(__half value) {
    unsigned sign = (value.bits & 0x8000u) << 16, size = value.bits & 0x7fff;
    if (size > 0x7c00) return __uint_as_float(0x7fffffff);
    if (size == 0x7c00) return __uint_as_float(sign | 0x7f800000);
    float magnitude = size < 0x400 ? size * 0x1p-24f : __uint_as_float((size << 13) + (112u << 23));
    return __uint_as_float(sign | __float_as_uint(magnitude));
}
