// How kernels reach other ranks: map, store, signal, wait. Another transport inside a node would change this file, and
// the plain stores to mapped addresses in copy.cuh and signals.cuh.
//
// map     The address of a rank's control block or pool. Every rank's memory is mapped into this process, so a peer is
//         reached by ordinary addresses. common/views.h finds the words inside a control block.
// store   Writes data into a peer's memory. A store does not tell the peer when it may read the data.
// signal  Writes a word into a peer's memory to show that earlier stores have arrived. Signals carry the epoch or a
//         growing count; nothing resets them.
// wait    Waits for a word in this rank's own memory that a peer signals. Every wait has a deadline (sync.cuh:
//         Deadline).
//
// Memory order. A signal has release order at system scope: it covers the stores of its own thread. To cover the stores
// of other threads, join them first (__syncwarp, __syncthreads, or an acquire of what they released) and call fence().
// After one fence(), several signals may be plain stores. A wait has acquire order at system scope. Join the warp or
// CTA after it so that the other threads may also read. Fence the async proxy (ptx::fence_proxy_async) before bulk
// loads of data that the peer wrote.
//
// Host calls that reach peers are not in this file: copies by copy engines, and stream memory operations
// (cuda/collectives/all_gather.cu).
#pragma once
#include "cuda/core/sync.cuh"

namespace ep::cuda::peer {

// --- map -----------------------------------------------------------------------------------------------------------

// `Control`: the type of the block's contents.
template <class Control>
__device__ __forceinline__ Control& control(const Comm& comm, int rank) {
  return *at<Control>(control_at(comm, rank));
}
// All threads of a CTA: begins to load a table of addresses that is needed soon.
__device__ __forceinline__ void prefetch(Address table, int num_ranks) {
  for (int rank = static_cast<int>(threadIdx.x); rank < num_ranks; rank += static_cast<int>(blockDim.x))
    ptx::prefetch(at<const Address>(table) + rank);
}
__device__ __forceinline__ Address pool(const Comm& comm, Pool pool, int rank) { return pool_at(comm, pool, rank); }

// --- store ---------------------------------------------------------------------------------------------------------

// Stores with relaxed order: a word that carries its own epoch or flag, or a signal after fence().
__device__ __forceinline__ void store(uint64_t* to, uint64_t value) { ptx::st_relaxed_sys(to, value); }
// Two words as one store, aligned to 16 bytes: the peer sees both or neither.
__device__ __forceinline__ void store(void* to, uint64_t low, uint64_t high) { ptx::st_relaxed_sys(to, low, high); }
// Stores bytes from shared memory with the SM's copy engine. Sizes and addresses are multiples of 16. The caller
// commits and waits (ptx::bulk_commit, ptx::bulk_wait). Plain kernels store rows through the mapped address instead.
__device__ __forceinline__ void store_bulk(char* to, const char* from_shared, uint32_t bytes) {
  ptx::bulk_store(to, from_shared, bytes);
}

// --- signal --------------------------------------------------------------------------------------------------------

// Stalls until all earlier stores of this SM are done. Use as few as possible.
__device__ __forceinline__ void fence() { ptx::fence_acq_rel_sys(); }
__device__ __forceinline__ void signal(uint64_t* word, uint64_t value) { ptx::st_release_sys(word, value); }
// Two words as one store, aligned to 16 bytes.
__device__ __forceinline__ void signal(void* words, uint64_t low, uint64_t high) {
  ptx::st_release_sys(words, low, high);
}

// --- wait ----------------------------------------------------------------------------------------------------------

// One relaxed poll. It orders nothing.
__device__ __forceinline__ uint64_t poll(const uint64_t* word) { return ptx::ld_relaxed_sys(word); }
__device__ __forceinline__ void poll(const void* words, uint64_t* low, uint64_t* high) {
  ptx::ld_relaxed_sys(words, low, high);
}
// One poll with acquire order.
__device__ __forceinline__ uint64_t acquire(const uint64_t* word) { return ptx::ld_acquire_sys(word); }
__device__ __forceinline__ void acquire(const void* words, uint64_t* low, uint64_t* high) {
  ptx::ld_acquire_sys(words, low, high);
}

// Whether *word >= value; if so, with acquire order. A poll that finds less costs only a relaxed load.
__device__ __forceinline__ bool has_reached(const uint64_t* word, uint64_t value, uint64_t* seen) {
  *seen = poll(word);
  return *seen >= value && acquire(word) >= value;
}

// Waits until *word >= value, with acquire order. False after a fault. A timeout names `rank`. With `counts`, the time
// counts as waited for that rank.
__device__ inline bool wait_at_least(const Run& run, const uint64_t* word, uint64_t value, int rank,
                                     WaitFor whom = kPeer, bool counts = false) {
  if (acquire(word) >= value) return true;  // the usual case
  Deadline deadline{whom};
  uint64_t seen;
  while (!has_reached(word, value, &seen))
    if (!deadline.keep_waiting(run, rank, 0, value, seen)) return false;
  if (counts) deadline.count(run.comm, rank);
  return true;
}

}  // namespace ep::cuda::peer
