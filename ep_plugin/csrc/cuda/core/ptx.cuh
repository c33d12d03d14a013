// Wrappers of PTX instructions that CUDA C++ lacks, named by semantics, memory order and scope. All PTX of this project
// is in this file.
// Bulk copies need sm_90. In code for older architectures their bodies are empty, and no kernel that uses them is
// launched (launch.cuh: KernelLimits). So every kernel also has a plain path.
#pragma once
#include <cstdint>

#include "common/fp8.h"

namespace ep::ptx {

// --- Words that other threads, CTAs or ranks write ------------------------------------------------------------

__device__ __forceinline__ uint64_t ld_acquire_sys(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint64_t ld_relaxed_gpu(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ void st_relaxed_gpu(uint32_t* to, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void st_release_sys(uint64_t* to, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void st_release_sys(uint32_t* to, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void st_release_gpu(uint64_t* to, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
// 16 bytes in one access, aligned to 16.
__device__ __forceinline__ void st_release_sys(void* to, uint64_t low, uint64_t high) {
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "mov.b128 both, {%1, %2};\n"
      "st.release.sys.global.b128 [%0], both;\n"
      "}\n" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
}
__device__ __forceinline__ void ld_acquire_sys(const void* from, uint64_t* low, uint64_t* high) {
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "ld.acquire.sys.global.b128 both, [%2];\n"
      "mov.b128 {%0, %1}, both;\n"
      "}\n"
      : "=l"(*low), "=l"(*high)
      : "l"(from)
      : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(void* to, uint64_t low, uint64_t high) {
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "mov.b128 both, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], both;\n"
      "}\n" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
}
__device__ __forceinline__ void ld_relaxed_sys(const void* from, uint64_t* low, uint64_t* high) {
  asm volatile(
      "{\n"
      ".reg .b128 both;\n"
      "ld.relaxed.sys.global.b128 both, [%2];\n"
      "mov.b128 {%0, %1}, both;\n"
      "}\n"
      : "=l"(*low), "=l"(*high)
      : "l"(from)
      : "memory");
}
__device__ __forceinline__ void st_relaxed_sys(uint64_t* to, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t atom_add_acq_rel_gpu(uint64_t* to, uint64_t value) {
  uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(value) : "memory");
  return before;
}
__device__ __forceinline__ uint32_t atom_add_acq_rel_gpu(uint32_t* to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}
// One lane of a warp calls it. The thread waits for the result only where it uses it. If ptxas knew that the word is
// the same for all lanes, it would add once for all of them and distribute the results, and the thread would wait here.
// Adding threadIdx.y, which is 0, hides that.
__device__ __forceinline__ uint32_t atom_add_relaxed_gpu(uint32_t* to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to + threadIdx.y), "r"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ uint64_t atom_cas_relaxed_gpu(uint64_t* to, uint64_t expected, uint64_t value) {
  uint64_t before;
  asm volatile("atom.cas.relaxed.gpu.global.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(to), "l"(expected), "l"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ void red_add_relaxed_gpu(uint64_t* to, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void red_max_relaxed_gpu(uint64_t* to, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// --- Words that the warps of one CTA share, in shared memory ----------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}
// These are atomics and not plain stores and loads of the same order, because compute-sanitizer's racecheck treats
// plain accesses as unordered. The load is an atomic or with 0.
__device__ __forceinline__ void red_max_release_cta(int32_t* shared_word, int32_t value) {
  asm volatile("red.release.cta.shared::cta.max.s32 [%0], %1;" ::"r"(shared_address(shared_word)), "r"(value)
               : "memory");
}
__device__ __forceinline__ void red_add_release_cta(int32_t* shared_word, int32_t value) {
  asm volatile("red.release.cta.shared::cta.add.s32 [%0], %1;" ::"r"(shared_address(shared_word)), "r"(value)
               : "memory");
}
__device__ __forceinline__ int32_t ld_acquire_cta(int32_t* shared_word) {
  int32_t value;
  asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(shared_address(shared_word))
               : "memory");
  return value;
}

// Begins to load a line of device memory that no kernel writes.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// A barrier of some warps of a CTA. All lanes of these warps call it. Returns whether `vote` is true for all of them.
// __syncthreads uses barrier 0.
__device__ __forceinline__ bool barrier_and(uint32_t barrier, uint32_t threads, bool vote) {
  uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred mine, all;\n"
      "setp.ne.u32 mine, %3, 0;\n"
      "barrier.cta.red.and.aligned.pred all, %1, %2, mine;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<uint32_t>(vote))
      : "memory");
  return all != 0;
}

// --- Data that peers write, in global memory or copied to shared memory --------------------------------------------
// Ordinary loads that the compiler can neither move above an acquire nor turn into non-coherent ones.

__device__ __forceinline__ int4 ld_coherent(const int4* from) {
  int4 v;
  asm volatile("ld.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ int64_t ld_coherent(const int64_t* from) {
  int64_t value;
  asm volatile("ld.s64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ int32_t ld_coherent(const int32_t* from) {
  int32_t value;
  asm volatile("ld.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ float ld_coherent(const float* from) {
  float value;
  asm volatile("ld.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ char ld_coherent(const char* from) {
  int32_t value;
  asm volatile("ld.s8 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return static_cast<char>(value);
}

// Two magnitudes as e4m3, rounded to nearest even and saturated, in the low 16 bits. `low` is in the lowest 8 bits. The
// sign bit of a NaN is undefined.
__device__ __forceinline__ uint32_t to_e4m3x2(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3_magnitude(low) | e4m3_magnitude(high) << 8;
#endif
}

// Nanoseconds. All SMs share the clock.
__device__ __forceinline__ uint64_t globaltimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define EP_HAS_BULK 1
#else
#define EP_HAS_BULK 0
#endif

// --- Kernels that follow each other (launch.cuh: launch_early) ----------------------------------------------------

// griddepcontrol.wait: waits until the kernel ahead in the stream has ended and its writes are visible.
// A kernel that was launched early must call it in at least one CTA. Otherwise the next kernel in the stream would not
// wait for the kernel ahead of this one. Before the call, a kernel may read only three things: data from before the
// chain, whose first kernel is not launched early; faults, which it reads again later; and data for which a kernel of
// the chain has signalled State::positions_ready or State::counts_ready, or an arrival. (A send that is launched after
// the host has the totals comes after the first two signals.)
__device__ __forceinline__ void wait_on_dependency() {
#if EP_HAS_BULK
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// griddepcontrol.launch_dependents: if the next kernel in the stream is launched early, it may start when every CTA of
// this kernel has called this or ended.
__device__ __forceinline__ void launch_dependents() {
#if EP_HAS_BULK
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- Bulk copies between global and shared memory, done by the copy engine of the SM (the async proxy) ------------

// Orders this thread's ordinary accesses and bulk copies, in both directions.
__device__ __forceinline__ void fence_proxy_async() {
#if EP_HAS_BULK
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
// Does the same only for shared memory, and is cheaper. After it, bytes that this thread wrote there may be stored in
// bulk.
__device__ __forceinline__ void fence_proxy_async_shared() {
#if EP_HAS_BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// Makes initialised mbarriers visible to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
#if EP_HAS_BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
#if EP_HAS_BULK
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
#if EP_HAS_BULK
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}
// True if the phase of this parity is complete. May suspend the thread for a short, bounded time.
__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
#if EP_HAS_BULK
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
#else
  return true;
#endif
}
// Addresses and size are multiples of 16. The barrier counts the bytes as they arrive.
__device__ __forceinline__ void bulk_load(void* to_shared, const void* from, uint32_t bytes, uint64_t* barrier) {
#if EP_HAS_BULK
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to_shared)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}
__device__ __forceinline__ void bulk_store(void* to, const void* from_shared, uint32_t bytes) {
#if EP_HAS_BULK
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from_shared)), "r"(bytes)
               : "memory");
#endif
}
// Closes this thread's group of bulk stores.
__device__ __forceinline__ void bulk_commit() {
#if EP_HAS_BULK
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
// Waits until at most kPending of this thread's groups are not yet written.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
#if EP_HAS_BULK
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
// Waits until at most kPending of this thread's groups are not yet read from shared memory. The stages of all other
// groups may be overwritten.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
#if EP_HAS_BULK
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace ep::ptx
