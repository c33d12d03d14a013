// Functions that all kernels share: threads and warps, entering and leaving a step, faults, the deadline of a wait.
//
// Waits. Every wait uses a Deadline. It ends when the value arrives, when any thread of this rank has recorded a
// fault, when a peer has written an abort to this rank's board, or at the deadline. A kernel that gives up signals
// nothing to peers.
// CTAs. The CTAs of one kernel never wait for each other. Each counts itself when its work is done. The last CTA does
// the work that must follow: it signals consumed words and advances the epoch, or fills the outputs after a fault.
// Epochs. They live in State, not in kernel arguments, so that a replayed CUDA graph advances them. Every CTA reads its
// epoch before it counts itself, and only the last CTA advances it. Notify is the exception: its CTA 0 advances the
// epoch while the other CTAs may still compute positions, so they must not use Run::epoch. Low-latency kernels, which
// are short, count CTAs as they enter (low_latency.cuh).
#pragma once
#include "common/views.h"
#include "cuda/core/ptx.cuh"

namespace ep::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr uint64_t kAbortCheckNs = 20'000;  // between two reads of the abort word, which is in host memory

// One kernel's execution of one step. `ok` is the same for all threads of a CTA.
struct Run {
  const Comm& comm;
  Step step;
  uint64_t epoch;
  bool ok;
};

// --- Threads and warps -------------------------------------------------------------------------------------------

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / kWarp); }

// The lane's index in the last warp of the CTA; negative in the other warps.
__device__ __forceinline__ int lane_of_last_warp() {
  return static_cast<int>(threadIdx.x + kWarp) - static_cast<int>(blockDim.x);
}

// All lanes of a warp: the sum, or the largest, of their values.
__device__ __forceinline__ int64_t sum_of_warp(int64_t value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}
__device__ __forceinline__ int64_t max_of_warp(int64_t value) {
  for (int step = kWarp / 2; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

// One warp: the sum of the values of this lane and all lanes below it.
template <class T>
__device__ __forceinline__ T sum_through(T value) {
  for (int step = 1; step < kWarp; step *= 2) {
    const T below = __shfl_up_sync(kAllLanes, value, step);
    if (lane_id() >= step) value += below;
  }
  return value;
}

// Warps that share a list of items, and this warp's index among them. Consecutive indices are on different SMs, so that
// a short list uses all SMs.
struct Team {
  int64_t index;
  int64_t size;
};
__device__ __forceinline__ Team team_of_warps(int first_warp, int warps) {
  return Team{static_cast<int64_t>(warp_id() - first_warp) * gridDim.x + blockIdx.x,
              static_cast<int64_t>(warps) * gridDim.x};
}
__device__ __forceinline__ Team team_of_warps(int warps) { return team_of_warps(0, warps); }
__device__ __forceinline__ Team team_of_warps() { return team_of_warps(static_cast<int>(blockDim.x / kWarp)); }
// The first item at or after `begin` that belongs to this warp. Item i belongs to the warp with index i % size.
__device__ __forceinline__ int64_t first_of(const Team& team, int64_t begin) {
  const int64_t ahead = team.index - begin % team.size;
  return begin + (ahead < 0 ? ahead + team.size : ahead);
}

// --- Faults --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool faulted(const Comm& comm) { return ptx::ld_relaxed_gpu(&state_of(comm).fault) != 0; }

// Records the first fault of this communicator. Later kernels exit at once. Always returns false.
__device__ inline bool fail(const Comm& comm, FaultCode code, Step step, int peer, int field, int64_t expected,
                            int64_t seen) {
  if (ptx::atom_cas_relaxed_gpu(&state_of(comm).fault, 0, 1) == 0) {
    Board& board = board_of(comm);
    board.fault = Fault{code, step, peer, field, expected, seen};
    ptx::fence_acq_rel_sys();
    ptx::st_release_sys(&board.fault_set, 1u);
  }
  return false;
}

// Records that some rank sends more rows to another than a region of the pool holds.
__device__ inline bool fail_too_small(const Run& run, const Header& header, const Meta& meta) {
  return fail(run.comm, kTooSmall, run.step, run.comm.rank, 0, region_slots_of(run.comm, header), *meta.max_rows);
}

// --- Deadline ------------------------------------------------------------------------------------------------------

// Whether this thread should read the abort word now. The word is in host memory. If thousands of threads polled it,
// their reads would take the link's bandwidth from the rows. So one thread of the device reads it, every 20 us.
__device__ inline bool claims_abort_check(const Comm& comm, uint64_t now) {
  uint64_t* due = &state_of(comm).next_abort_check;
  const uint64_t at = ptx::ld_relaxed_gpu(due);
  return now > at && ptx::atom_cas_relaxed_gpu(due, at, now + kAbortCheckNs) == at;
}

// Whether a wait is for a peer or for another kernel of this rank. The deadline is the timeout shifted left by this
// value. A kernel of this rank gets four timeouts, because it waits for peers itself, up to three times; its own fault
// then names the right rank. kUntilMasked: the caller has a deadline of its own.
enum WaitFor { kPeer = 0, kOwnKernel = 2, kUntilMasked = 63 };

// The deadline of one wait of one thread. Call keep_waiting() after every poll that found nothing.
struct Deadline {
  WaitFor whom = kPeer;
  uint64_t since = 0;

  // Returns false when the wait must end. Then the fault is recorded, and a timeout names `peer`.
  __device__ bool keep_waiting(const Run& run, int peer, int detail, uint64_t expected, uint64_t seen) {
    const Comm& comm = run.comm;
    const uint64_t now = ptx::globaltimer();
    if (since == 0) since = now;
    if (faulted(comm)) return false;
    if (now - since > kAbortCheckNs && claims_abort_check(comm, now)) {
      const uint32_t by = ptx::ld_acquire_sys(&board_of(comm).abort);
      if (by != 0) return fail(comm, kAborted, run.step, static_cast<int>(by) - 1, 0, 0, 0);
    }
    if ((now - since) >> whom > static_cast<uint64_t>(comm.timeout_ns))
      return fail(comm, kTimeout, run.step, peer, detail, static_cast<int64_t>(expected), static_cast<int64_t>(seen));
    __nanosleep(40);
    return true;
  }

  // Adds the time since the first poll that found nothing to State::waited_ns. One thread calls it when a wait is over.
  __device__ void count(const Comm& comm, int peer) const {
    if (since != 0) ptx::red_add_relaxed_gpu(&state_of(comm).waited_ns[peer], ptx::globaltimer() - since);
  }
};

// Stops at this step's test gate until the test opens it. Returns true at once if the step has no gate. One thread
// calls it.
__device__ inline bool hold_at_gate(const Run& run) {
  if (run.comm.gate != run.step) return true;
  Board& board = board_of(run.comm);
  ptx::st_release_sys(&board.gate_reached, static_cast<uint32_t>(run.step));
  Deadline deadline;
  while (ptx::ld_acquire_sys(&board.gate_open) == 0)
    if (!deadline.keep_waiting(run, run.comm.rank, 0, 1, 0)) return false;
  return true;
}

// --- Entering and leaving a step -----------------------------------------------------------------------------------

// All threads of a CTA call it first in a kernel.
__device__ inline Run enter(const Comm& comm, Step step) {
  Run run{comm, step, state_of(comm).epoch[step - 1] + 1, true};
  run.ok = __syncthreads_or(faulted(comm)) == 0;
  return run;
}

// All threads of every CTA call it when the CTA's work is done. True in the CTA that is last.
__device__ inline bool last_to_finish(const Run& run) {
  __shared__ bool last;
  __syncthreads();  // thread 0 releases the writes of all threads
  if (threadIdx.x == 0) {
    uint64_t* done = &state_of(run.comm).ctas_done[run.step - 1];
    last = ptx::atom_add_acq_rel_gpu(done, 1) + 1 == gridDim.x;
    if (last) *done = 0;
  }
  __syncthreads();
  return last;
}

// All threads of the last CTA call it when the step succeeded.
__device__ inline void advance(const Run& run) {
  if (threadIdx.x == 0) state_of(run.comm).epoch[run.step - 1] = run.epoch;
}

}  // namespace ep::cuda
