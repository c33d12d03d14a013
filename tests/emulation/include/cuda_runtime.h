// The parts of CUDA C++ and its runtime that the kernels use, for a C++ compiler. A launch runs the kernel (simt.h).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <tuple>

#include "../simt.h"

// --- The language
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // a CTA is a thread

// threadIdx and the like: each use reads the value of the running fiber.
namespace simt {
template <class Find>
struct BuiltIn {
  struct {
    operator unsigned() const { return Find::index().x; }
  } x;
};
struct FindThread {
  static const Index& index() { return here->thread; }
};
struct FindBlock {
  static const Index& index() { return *here->block; }
};
struct FindBlockSize {
  static const Index& index() { return *here->block_size; }
};
struct FindGridSize {
  static const Index& index() { return *here->grid_size; }
};
}  // namespace simt
constexpr simt::BuiltIn<simt::FindThread> threadIdx{};
constexpr simt::BuiltIn<simt::FindBlock> blockIdx{};
constexpr simt::BuiltIn<simt::FindBlockSize> blockDim{};
constexpr simt::BuiltIn<simt::FindGridSize> gridDim{};

using std::max;
using std::min;

struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct float2 {
  float x, y;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

// --- Arithmetic
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned made = 0;
  for (int i = 0; i < 4; ++i) made |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return made;
}

template <class T>
T atomicAdd(T* to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
template <class T>
T atomicOr(T* to, T value) {
  return __atomic_fetch_or(to, value, __ATOMIC_RELAXED);
}
inline void __nanosleep(unsigned) { simt::poll_again(); }

// --- Instructions in which threads wait for each other
namespace simt {
template <class T>
uint64_t packed(T value) {
  static_assert(sizeof(T) <= 8, "a lane's value");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}
template <class T>
T unpacked(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline void require_all_lanes(unsigned mask) {
  if (mask != 0xFFFFFFFFu) __builtin_trap();  // no kernel asks for fewer
}
// The value of lane `source`; of the calling lane where there is no such lane.
template <class T>
T shuffle(const char* name, T value, int source) {
  const Exchange& exchange = sync_warp(name, packed(value));
  return source >= 0 && source < 32 ? unpacked<T>(value_of(exchange, static_cast<unsigned>(source))) : value;
}
template <class T, class Fold>
T reduce(const char* name, T value, Fold fold) {
  const Exchange& exchange = sync_warp(name, packed(value));
  T result = value;
  for (unsigned lane = 0; lane < 32; ++lane)
    if (exchange.lanes >> lane & 1 && lane != here->lane) result = fold(result, unpacked<T>(exchange.values[lane]));
  return result;
}
}  // namespace simt

inline void __syncwarp() { simt::sync_warp("syncwarp", 0); }
inline void __syncthreads() { simt::sync_cta("syncthreads", true); }
inline int __syncthreads_and(int vote) { return simt::sync_cta("syncthreads_and", vote != 0).all; }
inline int __syncthreads_or(int vote) { return simt::sync_cta("syncthreads_or", vote != 0).any; }

template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  simt::require_all_lanes(mask);
  const int first = static_cast<int>(simt::here->lane) / width * width;
  return simt::shuffle("shfl", value, first + lane % width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  simt::require_all_lanes(mask);
  return simt::shuffle("shfl_xor", value, static_cast<int>(simt::here->lane) ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int lanes) {
  simt::require_all_lanes(mask);
  return simt::shuffle("shfl_up", value, static_cast<int>(simt::here->lane) - lanes);
}
inline unsigned __ballot_sync(unsigned mask, int vote) {
  simt::require_all_lanes(mask);
  const unsigned mine = static_cast<unsigned>(vote != 0) << simt::here->lane;
  return simt::reduce("ballot", mine, [](unsigned a, unsigned b) { return a | b; });
}
inline int __all_sync(unsigned mask, int vote) {
  simt::require_all_lanes(mask);
  return simt::reduce("all", static_cast<int>(vote != 0), [](int a, int b) { return a & b; });
}
inline int __any_sync(unsigned mask, int vote) {
  simt::require_all_lanes(mask);
  return simt::reduce("any", static_cast<int>(vote != 0), [](int a, int b) { return a | b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value) {
  simt::require_all_lanes(mask);
  return simt::reduce("reduce_min", value, [](T a, T b) { return std::min(a, b); });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  simt::require_all_lanes(mask);
  return simt::reduce("reduce_max", value, [](T a, T b) { return std::max(a, b); });
}
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  simt::require_all_lanes(mask);
  return simt::reduce("reduce_add", value, [](T a, T b) { return a + b; });
}

// --- The runtime. There is one device; streams are numbers (simt.h).
using cudaStream_t = struct Stream*;
using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 232448;
  return cudaSuccess;
}
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int ptxVersion;
};
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  *attributes = {8192, 90};
  return cudaSuccess;
}
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

struct dim3 {
  dim3() = default;
  explicit dim3(unsigned x) : x(x) {}
  unsigned x = 1, y = 1, z = 1;
};
enum cudaLaunchAttributeID { cudaLaunchAttributeCooperative, cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int cooperative;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
// Kernels get their arguments by value, the same for all threads.
template <class... Parameters, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Args&... args) {
  const auto has = [&](cudaLaunchAttributeID id) {
    return std::any_of(config->attrs, config->attrs + config->numAttrs, [&](const auto& one) { return one.id == id; });
  };
  const simt::Launch launch{config->gridDim.x,
                            config->blockDim.x,
                            config->dynamicSmemBytes,
                            static_cast<uint64_t>(reinterpret_cast<uintptr_t>(config->stream)),
                            has(cudaLaunchAttributeCooperative),
                            has(cudaLaunchAttributeProgrammaticStreamSerialization)};
  const std::tuple<std::decay_t<Parameters>...> copies(args...);
  simt::enqueue(launch, [kernel, copies] { std::apply(kernel, copies); });
  return cudaSuccess;
}
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
