// The two barriers of a gather's CTA with the CTAs of its index on all peers, and how collective kernels begin and end.
//
//   barrier_before  The CTA signals that its rank has begun this operation, and waits for the same signal of all peers.
//                   So a rank writes into an output only when the stream of its owner has come to the operation.
//   barrier_after   The CTA signals that it has written its part, and waits for the same signal of all peers. So no
//                   kernel ends before all parts of all ranks have arrived.
//
// Co-residency. A CTA waits only for CTAs of its own index, and the kernels are launched cooperatively.
// Buffers. The signals are CtaSignal (common/collectives.h), one for each CTA and peer.
// Memory order. The threads of a CTA write, then join. One thread per peer fences at system scope and signals. The
// reader acquires at system scope, then joins its CTA.
#pragma once
#include "common/collectives.h"
#include "cuda/core/launch.cuh"
#include "cuda/core/peer.cuh"

namespace ep::cuda {

__device__ __forceinline__ DeviceControl& device_control(const Comm& comm, int rank) {
  return peer::control<DeviceControl>(comm, rank);
}

// All threads of a CTA call it first in a kernel. `ok` is the same for all of them.
__device__ inline Run enter_collective(const Comm& comm, Step step) {
  peer::prefetch(comm.control, comm.num_ranks);
  Run run{comm, step, device_control(comm, comm.rank).epoch + 1, true};
  run.ok = __syncthreads_or(faulted(comm)) == 0;
  return run;
}

__device__ inline bool check_signal(const Run& run, const CtaSignal& theirs, int peer, int64_t bytes, int64_t place) {
  const int64_t their_bytes = ptx::ld_coherent(&theirs.bytes), their_place = ptx::ld_coherent(&theirs.place);
  if (their_bytes != bytes) return fail(run.comm, kDisagree, run.step, peer, 1, bytes, their_bytes);
  if (their_place != place) return fail(run.comm, kDisagree, run.step, peer, kPieceFields, place, their_place);
  return true;
}

// For kernels whose words carry their own epoch, and which need no barrier. A peer whose shard has another size may
// have started another kind of kernel, so the first CTA also signals the size. All threads call it.
__device__ inline void signal_size(const Run& run, int64_t bytes) {
  const Comm& comm = run.comm;
  if (blockIdx.x != 0) return;
  for (int peer = static_cast<int>(threadIdx.x); peer < comm.num_ranks; peer += static_cast<int>(blockDim.x))
    if (peer != comm.rank)
      peer::store(&device_control(comm, peer).cta_signals[0][comm.rank], run.epoch, static_cast<uint64_t>(bytes));
}
// False, with a fault, if a peer has begun this operation with another size.
__device__ inline bool check_size(const Run& run, int peer, int64_t bytes) {
  uint64_t epoch, theirs;  // in one load, because the peer may already signal the size of its next operation
  peer::poll(&device_control(run.comm, run.comm.rank).cta_signals[0][peer], &epoch, &theirs);
  const int64_t seen = static_cast<int64_t>(theirs);
  return epoch != run.epoch || seen == bytes || fail(run.comm, kDisagree, run.step, peer, 1, bytes, seen);
}

// All threads. True when the CTAs of index `cta` of all peers have begun the operation, with the same shard and place.
// Joins the CTA.
__device__ inline bool barrier_before(const Run& run, int cta, int64_t bytes, int64_t place) {
  const Comm& comm = run.comm;
  bool ok = true;
  for (int peer = static_cast<int>(threadIdx.x); peer < comm.num_ranks; peer += static_cast<int>(blockDim.x)) {
    if (peer == comm.rank) continue;
    CtaSignal& there = device_control(comm, peer).cta_signals[cta][comm.rank];
    there.place = place;
    peer::signal(&there, run.epoch, static_cast<uint64_t>(bytes));
    const CtaSignal& here = device_control(comm, comm.rank).cta_signals[cta][peer];
    ok = ok && peer::wait_at_least(run, &here.ready, run.epoch, peer) && check_signal(run, here, peer, bytes, place);
  }
  return __syncthreads_and(ok) != 0;
}

// All threads, when the CTA has written its part. True when all peers have written theirs. Joins the CTA.
__device__ inline bool barrier_after(const Run& run, int cta) {
  const Comm& comm = run.comm;
  bool ok = true;
  __syncthreads();
  for (int peer = static_cast<int>(threadIdx.x); peer < comm.num_ranks; peer += static_cast<int>(blockDim.x)) {
    if (peer == comm.rank) continue;
    peer::fence();
    peer::signal(&device_control(comm, peer).cta_signals[cta][comm.rank].done, run.epoch);
    ok = peer::wait_at_least(run, &device_control(comm, comm.rank).cta_signals[cta][peer].done, run.epoch, peer) && ok;
  }
  return __syncthreads_and(ok) != 0;
}

// All threads of every CTA, at the end. The last CTA advances the epoch if its own part succeeded. True in the thread
// that advances it.
__device__ inline bool leave_collective(const Run& run, bool ok) {
  __syncthreads();
  if (threadIdx.x != 0) return false;
  DeviceControl& mine = device_control(run.comm, run.comm.rank);
  ptx::fence_acq_rel_gpu();
  if (ptx::atom_add_acq_rel_gpu(&mine.ctas_done, 1) + 1 != gridDim.x) return false;
  mine.ctas_done = 0;
  if (ok) mine.epoch = run.epoch;
  return ok;
}

inline void require_node(const Comm& comm) {
  require(comm.num_ranks >= 2 && comm.num_ranks <= kMaxRanks, "num_ranks", "2 to 72", comm.num_ranks);
  require(comm.rank >= 0 && comm.rank < comm.num_ranks, "rank", "a rank of the node", comm.rank);
}

// The widest of 16, 8, 4, 2 and 1 bytes that divides all of `bits`, the bitwise or of addresses and sizes.
inline int unit_of(uint64_t bits) {
  for (int unit = 16; unit > 1; unit /= 2)
    if (bits % static_cast<uint64_t>(unit) == 0) return unit;
  return 1;
}

}  // namespace ep::cuda
