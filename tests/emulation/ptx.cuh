// Replaces ep_plugin/csrc/cuda/core/ptx.cuh on CPUs: the same wrappers. That file documents them.
#pragma once
#include <cuda_runtime.h>

#include "common/fp8.h"

#define EP_HAS_BULK 1

namespace ep::ptx {

// --- Words that other threads, CTAs or ranks write
template <class T>
T ld_acquire_sys(const T* from) {
  return __atomic_load_n(from, __ATOMIC_ACQUIRE);
}
template <class T>
T ld_relaxed_sys(const T* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
template <class T>
T ld_relaxed_gpu(const T* from) {
  return __atomic_load_n(from, __ATOMIC_RELAXED);
}
inline void st_relaxed_gpu(uint32_t* to, uint32_t value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
template <class T>
void st_release_sys(T* to, T value) {
  __atomic_store_n(to, value, __ATOMIC_RELEASE);
}
inline void st_relaxed_sys(uint64_t* to, uint64_t value) { __atomic_store_n(to, value, __ATOMIC_RELAXED); }
inline void st_release_gpu(uint64_t* to, uint64_t value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }

inline void st_release_sys(void* to, uint64_t low, uint64_t high) {
  const unsigned __int128 both = static_cast<unsigned __int128>(high) << 64 | low;
  __atomic_store_n(static_cast<unsigned __int128*>(to), both, __ATOMIC_RELEASE);
}
inline void ld_acquire_sys(const void* from, uint64_t* low, uint64_t* high) {
  const unsigned __int128 both = __atomic_load_n(static_cast<const unsigned __int128*>(from), __ATOMIC_ACQUIRE);
  *low = static_cast<uint64_t>(both);
  *high = static_cast<uint64_t>(both >> 64);
}
inline void st_relaxed_sys(void* to, uint64_t low, uint64_t high) { st_release_sys(to, low, high); }
inline void ld_relaxed_sys(const void* from, uint64_t* low, uint64_t* high) { ld_acquire_sys(from, low, high); }

template <class T>
T atom_add_acq_rel_gpu(T* to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_ACQ_REL);
}
inline uint64_t atom_add_acq_rel_gpu(uint64_t* to, int value) {
  return __atomic_fetch_add(to, static_cast<uint64_t>(value), __ATOMIC_ACQ_REL);
}
inline uint32_t atom_add_relaxed_gpu(uint32_t* to, uint32_t value) {
  return __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
}
inline uint64_t atom_cas_relaxed_gpu(uint64_t* to, uint64_t expected, uint64_t value) {
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
inline void red_add_relaxed_gpu(uint64_t* to, uint64_t value) { __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
inline void red_max_relaxed_gpu(uint64_t* to, uint64_t value) {
  uint64_t seen = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (seen < value && !__atomic_compare_exchange_n(to, &seen, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
inline void fence_acq_rel_sys() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
inline void fence_acq_rel_gpu() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }

// --- Words that the warps of one CTA share
inline void red_max_release_cta(int32_t* word, int32_t value) { *word = std::max(*word, value); }
inline void red_add_release_cta(int32_t* word, int32_t value) { *word += value; }
inline int32_t ld_acquire_cta(int32_t* word) { return *word; }

inline void prefetch(const void*) {}
inline bool barrier_and(uint32_t barrier, uint32_t threads, bool vote) {
  return simt::sync_some(barrier, threads, vote).all;
}

// --- Data that peers write
template <class T>
T ld_coherent(const T* from) {
  return *from;
}

inline uint32_t to_e4m3x2(float low, float high) { return e4m3_magnitude(low) | e4m3_magnitude(high) << 8; }

inline uint64_t globaltimer() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// --- Kernels that follow each other
inline void wait_on_dependency() { simt::wait_on_dependency(); }
inline void launch_dependents() { simt::launch_dependents(); }

// --- Bulk copies
inline void fence_proxy_async() {}
inline void fence_proxy_async_shared() {}
inline void fence_mbarrier_init() {}
inline void mbarrier_init(uint64_t* barrier, uint32_t arrivals) { simt::barrier_init(barrier, arrivals); }
inline void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  simt::barrier_arrive_expect(barrier, bytes);
}
inline bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) { return simt::barrier_passed(barrier, parity); }
inline void bulk_load(void* to_shared, const void* from, uint32_t bytes, uint64_t* barrier) {
  simt::bulk_load(to_shared, from, bytes, barrier);
}
inline void bulk_store(void* to, const void* from_shared, uint32_t bytes) { simt::bulk_store(to, from_shared, bytes); }
inline void bulk_commit() { simt::bulk_commit(); }
template <int kPending>
void bulk_wait() {
  simt::bulk_wait(kPending, true);
}
template <int kPending>
void bulk_wait_read() {
  simt::bulk_wait(kPending, false);
}

}  // namespace ep::ptx
