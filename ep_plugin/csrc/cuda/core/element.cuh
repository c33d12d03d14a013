// Element types as 16-byte vectors. A sum widens elements to float32, and rounds to nearest once, at the end.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace ep::cuda {

struct Float32 {
  static constexpr int kPerVector = 4;
  static __device__ __forceinline__ void widen(float* to, int4 vector) {
    to[0] = __int_as_float(vector.x);
    to[1] = __int_as_float(vector.y);
    to[2] = __int_as_float(vector.z);
    to[3] = __int_as_float(vector.w);
  }
  // sum += factor * vector. kFirst: starts from 0 instead of `sum`.
  template <bool kFirst = false>
  static __device__ __forceinline__ void add(float* sum, int4 vector, float factor) {
    sum[0] = fmaf(factor, __int_as_float(vector.x), kFirst ? 0.0f : sum[0]);
    sum[1] = fmaf(factor, __int_as_float(vector.y), kFirst ? 0.0f : sum[1]);
    sum[2] = fmaf(factor, __int_as_float(vector.z), kFirst ? 0.0f : sum[2]);
    sum[3] = fmaf(factor, __int_as_float(vector.w), kFirst ? 0.0f : sum[3]);
  }
  static __device__ __forceinline__ int4 narrow(const float* sum) {
    return make_int4(__float_as_int(sum[0]), __float_as_int(sum[1]), __float_as_int(sum[2]), __float_as_int(sum[3]));
  }
};

// Two elements in a 32-bit word.
struct BFloat16Pair {
  static __device__ __forceinline__ float2 widen(int32_t word) {
    return make_float2(__int_as_float(word << 16), __int_as_float(word & static_cast<int32_t>(0xFFFF0000u)));
  }
  static __device__ __forceinline__ int32_t narrow(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return static_cast<int32_t>(*reinterpret_cast<const uint32_t*>(&pair));
  }
};
struct Float16Pair {
  static __device__ __forceinline__ float2 widen(int32_t word) {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
  static __device__ __forceinline__ int32_t narrow(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return static_cast<int32_t>(*reinterpret_cast<const uint32_t*>(&pair));
  }
};

// Vectors of 8 elements of 16 bits.
template <class Pair>
struct SixteenBit {
  static constexpr int kPerVector = 8;
  static __device__ __forceinline__ void widen(float* to, int4 vector) {
    widen_pair(to + 0, vector.x);
    widen_pair(to + 2, vector.y);
    widen_pair(to + 4, vector.z);
    widen_pair(to + 6, vector.w);
  }
  template <bool kFirst = false>
  static __device__ __forceinline__ void add(float* sum, int4 vector, float factor) {
    add_pair<kFirst>(sum + 0, vector.x, factor);
    add_pair<kFirst>(sum + 2, vector.y, factor);
    add_pair<kFirst>(sum + 4, vector.z, factor);
    add_pair<kFirst>(sum + 6, vector.w, factor);
  }
  static __device__ __forceinline__ int4 narrow(const float* sum) {
    return make_int4(Pair::narrow(sum[0], sum[1]), Pair::narrow(sum[2], sum[3]), Pair::narrow(sum[4], sum[5]),
                     Pair::narrow(sum[6], sum[7]));
  }

 private:
  static __device__ __forceinline__ void widen_pair(float* to, int32_t word) {
    const float2 pair = Pair::widen(word);
    to[0] = pair.x;
    to[1] = pair.y;
  }
  template <bool kFirst>
  static __device__ __forceinline__ void add_pair(float* sum, int32_t word, float factor) {
    const float2 pair = Pair::widen(word);
    sum[0] = fmaf(factor, pair.x, kFirst ? 0.0f : sum[0]);
    sum[1] = fmaf(factor, pair.y, kFirst ? 0.0f : sum[1]);
  }
};
using BFloat16 = SixteenBit<BFloat16Pair>;
using Float16 = SixteenBit<Float16Pair>;

}  // namespace ep::cuda
