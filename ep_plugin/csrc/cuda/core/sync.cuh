// How CUDA kernels wait for peers, tell peers, meet at their end, and fail.
//
// Waiting. Every wait for another rank goes through Patience: it ends by the value, by a fault that anyone on this
// rank recorded, by an abort that a peer wrote to this rank's board, or by the deadline. A kernel that gives up
// signals nothing to peers.
// Meeting. The CTAs of one kernel never wait for each other. Each counts itself in when it is done, and the last one
// does what must come after all of them: consumed words, the epoch, poisoned outputs. Epochs live in State, so that a
// replayed CUDA graph moves on; every CTA reads its epoch before it counts itself in, and only the last one advances
// it. Notify is the exception: its CTA 0 exchanges counts and advances the epoch, whether the others, which place
// tokens, are done or have yet to begin, so that what they find in Run::epoch says nothing.
// Memory order. How rows are told to peers is in signals.cuh. Readers acquire a flag at system scope, join their warp
// or CTA, and fence the async proxy before bulk loads of what peers wrote.
#pragma once
#include "common/views.h"
#include "cuda/core/ptx.cuh"

namespace ep::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;
constexpr uint64_t kAbortLookNs = 20'000;  // the abort word is host memory: look at it now and then only

// One kernel's stay in its step. `ok` is the same for all threads of a CTA.
struct Run {
  const Comm& comm;
  Step step;
  uint64_t epoch;
  bool ok;
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % kWarp); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / kWarp); }

// Negative in other warps of the CTA.
__device__ __forceinline__ int lane_of_last_warp() {
  return static_cast<int>(threadIdx.x + kWarp) - static_cast<int>(blockDim.x);
}

// Consecutive indices lie on different SMs, so that a short chunk spreads over all of them.
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
// The first number at or after `begin` that is this member's: numbers go round the team.
__device__ __forceinline__ int64_t first_of(const Team& team, int64_t begin) {
  const int64_t ahead = team.index - begin % team.size;
  return begin + (ahead < 0 ? ahead + team.size : ahead);
}

__device__ __forceinline__ bool faulted(const Comm& comm) { return ptx::ld_relaxed_gpu(&state_of(comm).fault) != 0; }

// Records the first fault of this communicator; later kernels leave at once. Always returns false.
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

// Some rank sends more rows to one than a region of the pools holds.
__device__ inline bool fail_too_small(const Run& run, const Header& header, const Meta& meta) {
  return fail(run.comm, kTooSmall, run.step, run.comm.rank, 0, region_slots_of(run.comm, header), *meta.max_rows);
}

// Whether this thread is the one that looks at the abort word now. The word is host memory, and thousands of threads
// that each read it would take the link from the rows: one thread of the device does, now and then.
__device__ inline bool abort_look_is_mine(const Comm& comm, uint64_t now) {
  uint64_t* due = &state_of(comm).abort_look;
  const uint64_t at = ptx::ld_relaxed_gpu(due);
  return now > at && ptx::atom_cas_relaxed_gpu(due, at, now + kAbortLookNs) == at;
}

// Who a wait is for. This rank's own kernels get four deadlines: they wait for peers themselves, up to three times, and
// know whom to name.
enum WaitFor { kPeer = 0, kOwnKernel = 2 };

// One wait of one thread: ask keep_waiting() after every look that was in vain.
struct Patience {
  WaitFor whom = kPeer;
  uint64_t since = 0;

  __device__ bool keep_waiting(const Run& run, int peer, int detail, uint64_t expected, uint64_t seen) {
    const Comm& comm = run.comm;
    const uint64_t now = ptx::globaltimer();
    if (since == 0) since = now;
    if (faulted(comm)) return false;
    if (now - since > kAbortLookNs && abort_look_is_mine(comm, now)) {
      const uint32_t by = ptx::ld_acquire_sys(&board_of(comm).abort);
      if (by != 0) return fail(comm, kAborted, run.step, static_cast<int>(by) - 1, 0, 0, 0);
    }
    if ((now - since) >> whom > static_cast<uint64_t>(comm.timeout_ns))
      return fail(comm, kTimeout, run.step, peer, detail, static_cast<int64_t>(expected), static_cast<int64_t>(seen));
    __nanosleep(40);
    return true;
  }
};

// Whether *word >= value; then with acquire at system scope. A look in vain costs no more than a load.
__device__ __forceinline__ bool has_reached(const uint64_t* word, uint64_t value, uint64_t* seen) {
  *seen = ptx::ld_relaxed_sys(word);
  return *seen >= value && ptx::ld_acquire_sys(word) >= value;
}

// Waits until *word >= value, with acquire at system scope.
__device__ inline bool wait_at_least(const Run& run, const uint64_t* word, uint64_t value, int peer,
                                     WaitFor whom = kPeer) {
  if (ptx::ld_acquire_sys(word) >= value) return true;  // as is usual where it was written long ago
  Patience patience{whom};
  uint64_t seen;
  while (!has_reached(word, value, &seen))
    if (!patience.keep_waiting(run, peer, 0, value, seen)) return false;
  return true;
}

// Called by all threads of a CTA, first thing in a kernel.
__device__ inline Run enter(const Comm& comm, Step step) {
  Run run{comm, step, state_of(comm).epoch[step - 1] + 1, true};
  run.ok = __syncthreads_or(faulted(comm)) == 0;
  return run;
}

// Called by all threads of every CTA, when the CTA's own work is done: true in the CTA that comes last.
__device__ inline bool last_to_finish(const Run& run) {
  __shared__ bool last;
  __syncthreads();  // what any thread wrote, thread 0 passes on
  if (threadIdx.x == 0) {
    uint64_t* done = &state_of(run.comm).ctas_done[run.step - 1];
    last = ptx::atom_add_acq_rel_gpu(done, 1) + 1 == gridDim.x;
    if (last) *done = 0;
  }
  __syncthreads();
  return last;
}

// The last CTA's end of a step that went well; called by all its threads. Only a reader has words to store, a thread
// for each source.
__device__ inline void advance(const Run& run) {
  if (threadIdx.x == 0) state_of(run.comm).epoch[run.step - 1] = run.epoch;
}
__device__ inline void tell_consumed(const Run& run, int kind, int source) {
  const Comm& comm = run.comm;
  if (source < comm.num_ranks) ptx::st_release_sys(consumed_word(comm, source, kind, comm.rank), run.epoch);
}

// A sender says that all its CTAs run: whoever waits on SMs for its rows may now be let in. One warp of each CTA. An
// optimistic one that leaves says so too, and those who are let in find what it has found.
__device__ inline void tell_started(const Run& run, Pool pool) {
  if (lane_id() != 0) return;
  State& state = state_of(run.comm);
  if (ptx::atom_add_acq_rel_gpu(&state.ctas_started[pool], 1) + 1 != gridDim.x) return;
  state.ctas_started[pool] = 0;
  ptx::st_release_gpu(&state.started[pool], run.epoch);
}

// Holds a rank at its test gate; without one, returns true at once. One thread calls it.
__device__ inline bool hold_at_gate(const Run& run) {
  if (run.comm.gate != run.step) return true;
  Board& board = board_of(run.comm);
  ptx::st_release_sys(&board.gate_reached, static_cast<uint32_t>(run.step));
  Patience patience;
  while (ptx::ld_acquire_sys(&board.gate_open) == 0)
    if (!patience.keep_waiting(run, run.comm.rank, 0, 1, 0)) return false;
  return true;
}

// The CTA's last warp, a lane for each destination, waits until it has read the rows of the epoch before. Other warps
// go on to the CTA's next join; may_send() is the last that they can.
__device__ inline bool destination_has_read(const Run& run, Pool pool) {
  const Comm& comm = run.comm;
  const int dest = lane_of_last_warp();
  if (dest < 0 || dest >= comm.num_ranks) return true;
  return wait_at_least(run, consumed_word(comm, comm.rank, pool, dest), run.epoch - 1, dest);
}

// Whether `sound` holds for all threads, which call it after destination_has_read(), and it joins them.
__device__ inline bool may_send(bool sound) {
  sound = __syncthreads_and(sound) != 0;
  ptx::fence_proxy_async();  // bulk stores overwrite what those peers have read
  return sound;
}

// One warp of CTA 0, after that: what every destination hears before the first row.
__device__ inline void open_destinations(const Run& run, Pool pool, const Header& mine) {
  const Comm& comm = run.comm;
  if (blockIdx.x == 0 && lane_id() < comm.num_ranks) {
    Opening* word = opening(comm, lane_id(), pool, comm.rank);
    word->header = mine;
    ptx::st_release_sys(&word->flag, run.epoch);
  }
  __syncwarp();
}

__device__ inline bool check_opening(const Run& run, const Opening* word, int source, const Header& mine,
                                     int64_t expected_tokens) {
  const int64_t* ours = reinterpret_cast<const int64_t*>(&mine);
  const int64_t* theirs = reinterpret_cast<const int64_t*>(&word->header);
  for (int field = 0; field < kComparedFields; ++field) {
    const int64_t seen = ptx::ld_coherent(theirs + field);
    if (seen != ours[field]) return fail(run.comm, kDisagree, run.step, source, field, ours[field], seen);
  }
  const int64_t tokens = ptx::ld_coherent(theirs + kComparedFields);
  if (expected_tokens >= 0 && tokens != expected_tokens)
    return fail(run.comm, kDisagree, run.step, source, kComparedFields, expected_tokens, tokens);
  return true;
}

// Waits for a source's Opening and compares it with this rank's own header.
__device__ inline bool open_source(const Run& run, Pool pool, int source, const Header& mine,
                                   const int32_t* src_tokens) {
  const Opening* word = opening(run.comm, run.comm.rank, pool, source);
  return wait_at_least(run, &word->flag, run.epoch, source) &&
         check_opening(run, word, source, mine, src_tokens == nullptr ? -1 : src_tokens[source]);
}

// Every source's, by the CTA's last warp, a lane for each. `src_tokens` may be null. Other warps go on to the join.
__device__ inline bool open_source_of_lane(const Run& run, Pool pool, const Header& mine, const int32_t* src_tokens) {
  const int source = lane_of_last_warp();
  return source < 0 || source >= run.comm.num_ranks || open_source(run, pool, source, mine, src_tokens);
}
// The same for one warp of a kernel whose other warps do something else.
__device__ inline bool open_sources_of_warp(const Run& run, Pool pool, const Header& mine, const int32_t* src_tokens) {
  const int source = lane_id();
  const bool ok = source >= run.comm.num_ranks || open_source(run, pool, source, mine, src_tokens);
  return __all_sync(kAllLanes, ok) != 0;
}

}  // namespace ep::cuda
