// How the CTAs of one index on all ranks of a node meet, before they touch each other's memory and after.
//
// Each CTA of a kernel says that its rank has come to this operation, waits until the CTAs of its index on all peers
// have, moves its part, says that it has, and waits until they have. So no rank's kernel ends before all parts of all
// ranks are where they belong, and none begins to write before its peers' streams have come to the operation.
// Co-residency. A CTA waits only for CTAs of its own index, and the kernels are launched cooperatively.
// Memory order. A CTA's threads write, join, and one of them fences at system scope and stores the flag with release.
// The reader acquires at system scope and joins its CTA. Words: Sign in collectives.h.
#pragma once
#include "common/collectives.h"
#include "cuda/core/launch.cuh"
#include "cuda/core/sync.cuh"

namespace ep::cuda {

__device__ __forceinline__ DeviceControl& device_control(const Comm& comm, int rank) {
  return *at<DeviceControl>(comm.control[rank]);
}

// Called by all threads of a CTA, first thing in a kernel. `ok` is the same for all of them.
__device__ inline Run enter_collective(const Comm& comm, Step step) {
  Run run{comm, step, device_control(comm, comm.rank).epoch + 1, true};
  run.ok = __syncthreads_or(faulted(comm)) == 0;
  return run;
}

__device__ inline bool check_sign(const Run& run, const Sign& theirs, int peer, int64_t bytes, int64_t place) {
  const int64_t their_bytes = ptx::ld_coherent(&theirs.bytes), their_place = ptx::ld_coherent(&theirs.place);
  if (their_bytes != bytes) return fail(run.comm, kDisagree, run.step, peer, 1, bytes, their_bytes);
  if (their_place != place) return fail(run.comm, kDisagree, run.step, peer, kOfferFields, place, their_place);
  return true;
}

// Kernels whose words tell what they are of do not meet. For a peer whose kernel is of another kind, all threads of the
// first CTA say the size.
__device__ inline void tell_size(const Run& run, int64_t bytes) {
  const Comm& comm = run.comm;
  const int peer = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && peer < comm.num_ranks && peer != comm.rank)
    ptx::st_relaxed_sys(&device_control(comm, peer).signs[0][comm.rank], run.epoch, static_cast<uint64_t>(bytes));
}
// False if a peer came to this operation with another size.
__device__ inline bool is_alike(const Run& run, int peer, int64_t bytes) {
  uint64_t epoch, theirs;  // in one piece: the peer may be at the next operation by now, and say its size
  ptx::ld_relaxed_sys(&device_control(run.comm, run.comm.rank).signs[0][peer], &epoch, &theirs);
  const int64_t seen = static_cast<int64_t>(theirs);
  return epoch != run.epoch || seen == bytes || fail(run.comm, kDisagree, run.step, peer, 1, bytes, seen);
}

// Tells every peer's CTA of index `cta` that this one is here; true when all are. Joins the CTA.
__device__ inline bool meet_before(const Run& run, int cta, int64_t bytes, int64_t place) {
  const Comm& comm = run.comm;
  const int peer = static_cast<int>(threadIdx.x);
  bool ok = true;
  if (peer < comm.num_ranks && peer != comm.rank) {
    Sign& there = device_control(comm, peer).signs[cta][comm.rank];
    there.place = place;
    ptx::st_release_sys(&there, run.epoch, static_cast<uint64_t>(bytes));
    const Sign& here = device_control(comm, comm.rank).signs[cta][peer];
    ok = wait_at_least(run, &here.ready, run.epoch, peer) && check_sign(run, here, peer, bytes, place);
  }
  return __syncthreads_and(ok) != 0;
}

// The same when this CTA's part is done.
__device__ inline bool meet_after(const Run& run, int cta) {
  const Comm& comm = run.comm;
  const int peer = static_cast<int>(threadIdx.x);
  bool ok = true;
  __syncthreads();
  if (peer < comm.num_ranks && peer != comm.rank) {
    ptx::fence_acq_rel_sys();
    ptx::st_release_sys(&device_control(comm, peer).signs[cta][comm.rank].done, run.epoch);
    ok = wait_at_least(run, &device_control(comm, comm.rank).signs[cta][peer].done, run.epoch, peer);
  }
  return __syncthreads_and(ok) != 0;
}

// All threads of every CTA, at the end: the last CTA moves the epoch on, when its own part went well. True in the
// thread that does.
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
  require(comm.num_ranks >= 2 && comm.num_ranks <= kMaxRanks, "num_ranks", "2 to 16", comm.num_ranks);
  require(comm.rank >= 0 && comm.rank < comm.num_ranks, "rank", "a rank of the node", comm.rank);
}

// The widest of 16, 8, 4, 2 and 1 bytes that divides all of `bits`, addresses and sizes or-ed together.
inline int unit_of(uint64_t bits) {
  for (int unit = 16; unit > 1; unit /= 2)
    if (bits % static_cast<uint64_t>(unit) == 0) return unit;
  return 1;
}

}  // namespace ep::cuda
