// The common part of both low-latency kernels: roles, waits that a mask ends, batches of flags, and the end of an
// operation. common/low_latency.h has the layout and the protocol; ll_dispatch.cu and ll_combine.cu are the kernels.
//
// Roles. In each CTA the last warp signals, and the others are workers. Workers wait for each other at a barrier of
// their own, so the signalling warp can stall in a fence while workers go on to receive. Workers send tokens in
// batches, see Batches. When a warp has written its share of a batch, it counts itself. When all have, the signalling
// warp fences once at system scope and stores the flags of the batch.
//
// Buffers. A word is 12 bytes of data and the epoch in one 16-byte access. Rows are loaded and stored 16 bytes at a
// time, straight from memory to the slots of peers. Nothing is staged.
//
// Memory order. Words are relaxed: each is complete by itself. Worker warps release their counts in the CTA; the
// signalling warp acquires them, fences at system scope, and stores the flags. A reader acquires a flag at system scope
// in one lane and joins its warp before the warp loads the rows. No bulk copies are used, so no proxy is fenced.
//
// CTAs. Each CTA counts itself when it has entered. All CTAs have read the epoch when the last one enters, so that CTA
// advances it. Only some kernels also count CTAs that finish (ll_counts_ctas).
//
// Masks. Each CTA reads the masks once, when it enters. With `shrink`, masks can change while a kernel runs: a wait
// sets a mask at its deadline, and headers carry the masks of peers. So with `shrink`, a wait that takes long reads the
// masks again.
//
// Instructions. A kernel runs most of its instructions once or twice, and fetches them from memory. So it is faster
// with fewer instructions, and with code that lies in the order in which it runs. Calls whose bounds allow few tokens
// have kernels of their own, without the code for many tokens.
//
// Waits. The signalling warp waits for its own workers without a deadline, because all their waits have one. A fault
// ends it.
#pragma once
#include "common/low_latency_args.h"
#include "cuda/core/copy.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/peer.cuh"

namespace ep::cuda {

constexpr int kLlLeastWorkers = 3;
constexpr int kLlPolls = 16;  // a wait for few words polls this often before it looks for faults and at its deadline

// --- Roles ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int num_workers() { return static_cast<int>(blockDim.x / kWarp) - 1; }
__device__ __forceinline__ int worker_threads() { return static_cast<int>(blockDim.x) - kWarp; }
// All workers wait for each other. True if `ok` is true in all of their threads.
__device__ __forceinline__ bool join_workers(bool ok = true) {
  __syncwarp();  // lanes may leave a wait at different times, and the barrier takes whole warps
  return ptx::barrier_and(1, static_cast<uint32_t>(worker_threads()), ok);
}

// The number of this worker among all of the kernel. Consecutive numbers are on different SMs.
__device__ __forceinline__ Team team_of_workers() { return team_of_warps(num_workers()); }

// What a CTA reads of its peers when it enters. It is in shared memory.
struct LlPeers {
  Address block[kMaxRanks];
  uint32_t masked[kRankWords];  // the ranks that were masked when this CTA began to send or to receive
};

// One half of one operation, as a CTA runs it.
struct LlRun {
  const LlOperation& op;
  const LlLayout& lay;
  LlKind kind;
  Run run;
  int parity;
  const LlPeers* peers;

  __device__ LlState& state() const { return ll_state_of(op); }
  __device__ LlBlock block(int rank) const { return LlBlock{peers->block[rank], lay, op.comm.num_ranks, op.shape}; }
  __device__ LlBlock own() const { return LlBlock{op.comm.own_control, lay, op.comm.num_ranks, op.shape}; }
  __device__ bool is_masked(int rank) const { return has_rank(peers->masked, rank); }
  __device__ uint32_t tag() const { return static_cast<uint32_t>(run.epoch); }
  __device__ bool receives() const { return run.step == kLlDispatchRecv || run.step == kLlCombineRecv; }
  // The polls of a wait for few words. Their time does not count as waited.
  __device__ int polls() const { return op.wait_cost != 0 ? 1 : kLlPolls; }
};

__device__ inline LlRun ll_half(const LlOperation& op, const LlLayout& lay, LlKind kind, LlPhase phase, uint64_t epoch,
                                const LlPeers& peers) {
  const int first = kind == kLlDispatch ? kLlDispatchSend : kLlCombineSend;
  const Step step = static_cast<Step>(phase == kLlSend ? first : first + 1);
  return LlRun{op, lay, kind, Run{op.comm, step, epoch, true}, ll_parity(epoch), &peers};
}

// --- Waits ---------------------------------------------------------------------------------------------------------

enum class Found { kThere, kMasked, kGaveUp };

// Signals to the peers whether this rank waits for another one.
__device__ inline void ll_announce_wait(const LlRun& ll, bool waits) {
  uint64_t* count = &ll.state().waits;
  const uint64_t before = ptx::ld_relaxed_gpu(count);
  if ((before & 1) == waits || ptx::atom_cas_relaxed_gpu(count, before, before + 1) != before) return;
#pragma unroll 1
  for (int peer = 0; peer < ll.op.comm.num_ranks; ++peer)  // not by ll.block(), which ll_enter() has yet to fill
    ptx::st_release_sys(ll_block(ll.op, peer).waiting(ll.op.comm.rank), static_cast<uint32_t>(before + 1));
}

// The deadline after which a wait with `shrink` masks its peer. A peer that has waited itself gets more time, see
// low_latency.h.
struct MaskDeadline {
  uint64_t since = 0;
  uint32_t waits = 0;  // the peer's word at that time
  int renewed = 0;

  __device__ bool passed(const LlRun& ll, int peer) {
    const uint64_t now = ptx::globaltimer(), most = static_cast<uint64_t>(ll.op.comm.timeout_ns);
    const bool begins = since == 0;
    if (begins) since = now;
    if (now - since > most / 2) ll_announce_wait(ll, true);
    if (!begins && now - since <= most) return false;
    const uint32_t latest = ptx::ld_acquire_sys(ll.own().waiting(peer));
    const bool has_waited = (latest & 1) != 0 || latest != waits;
    waits = latest;
    if (begins) return false;
    since = now;
    return !has_waited || ++renewed > ll.op.comm.num_ranks;
  }
};

// One poll of a wait. It looks for `words` consecutive words that carry the tag `value`. With words = 0 it looks for a
// number that is at least `value`, with acquire order.
struct Awaited {
  const void* at;
  uint64_t value;
  int words;

  __device__ bool arrived(uint64_t* seen) const {
    if (words == 0) return peer::has_reached(static_cast<const uint64_t*>(at), value, seen);
    bool there = true;
#pragma unroll 1
    for (int i = 0; i < words; ++i) {
      uint64_t low, high;
      peer::poll(static_cast<const LlWord*>(at) + i, &low, &high);
      if (high >> 32 != value) there = false, *seen = high >> 32;
    }
    return there;
  }
};

// Code that runs only if a wait takes long, or after a fault, is out of line. Kernels that are not in a cache are
// fetched from memory as they run, so every launch would pay for that code.
static __device__ EP_NOINLINE bool ll_fail_in(const Comm& comm, Step step, FaultCode code, int peer, int field,
                                              int64_t expected, int64_t seen) {
  return fail(comm, code, step, peer, field, expected, seen);
}
__device__ __forceinline__ bool ll_fail(const LlRun& ll, FaultCode code, int peer, int field, int64_t expected,
                                        int64_t seen) {
  return ll_fail_in(ll.op.comm, ll.run.step, code, peer, field, expected, seen);
}

static __device__ EP_NOINLINE Found ll_wait_longer(const LlRun ll, int peer, const Awaited awaited) {
  const bool shrink = ll.op.shrink != 0;
  uint32_t* mask = &ll.state().mask[peer];
  Deadline deadline{shrink ? kUntilMasked : kPeer};
  MaskDeadline to_mask;
  uint64_t seen = 0;
  Found found = Found::kThere;
  while (!awaited.arrived(&seen)) {
    if (shrink && to_mask.passed(ll, peer)) ptx::st_relaxed_gpu(mask, 1);
    if (shrink && ptx::ld_relaxed_gpu(mask) != 0) {
      found = Found::kMasked;
      break;
    }
    if (!deadline.keep_waiting(ll.run, peer, 0, awaited.value, seen)) return Found::kGaveUp;
  }
  if (deadline.since != 0 && ll.run.step != kLlDispatchSend && ll.op.wait_cost != 0)
    ptx::red_max_relaxed_gpu(&ll.state().waited[peer], ptx::globaltimer() - deadline.since);
  return found;
}

// One thread: waits for a growing word of this rank's block, a flag or a consumed word. It has acquire order.
__device__ inline Found ll_wait_at_least(const LlRun& ll, int peer, const uint64_t* word, uint64_t value) {
  if (ll.is_masked(peer)) return Found::kMasked;
  uint64_t seen = 0;
  return peer::has_reached(word, value, &seen) ? Found::kThere : ll_wait_longer(ll, peer, Awaited{word, value, 0});
}

// All lanes: lane 0 waits for a flag of the peer, then all may read its rows.
__device__ inline Found ll_wait_rows(const LlRun& ll, int peer, int group) {
  Found found = Found::kThere;
  if (lane_id() == 0) found = ll_wait_at_least(ll, peer, ll.own().flag(ll.kind, ll.parity, peer, group), ll.run.epoch);
  found = static_cast<Found>(__shfl_sync(kAllLanes, static_cast<int>(found), 0));
  __syncwarp();
  return found;
}

// --- Entering ------------------------------------------------------------------------------------------------------

// All threads: enters the kernel, and fills `peers`. With a send half, waits until the peers have read the data that
// this rank wrote two operations ago. False after a fault.
__device__ inline bool ll_enter(const LlRun& ll, LlPeers& peers) {
  const Comm& comm = ll.op.comm;
  bool ok = !faulted(comm);
#pragma unroll 1
  for (int base = warp_id() * kWarp; base < kRankWords * kWarp; base += static_cast<int>(blockDim.x)) {
    const int peer = base + lane_id();
    bool masked = false;
    if (peer < comm.num_ranks) {
      const Address block = address_in(comm.control, peer);
      masked = ptx::ld_relaxed_gpu(&ll.state().mask[peer]) != 0;
      if (!ll.receives() && ll.run.epoch > kLlParities) {
        const uint64_t* word = ll.own().consumed(ll.kind, ll.parity, peer);
        const uint64_t value = ll.run.epoch - kLlParities;
        // Usually this is one load, in addition to the loads of the mask and the address.
        if (peer::acquire(word) < value && ok && !masked) {
          const Found found = ll_wait_longer(ll, peer, Awaited{word, value, 0});
          masked = found == Found::kMasked;
          ok = found != Found::kGaveUp;
        }
      }
      peers.block[peer] = block;
    }
    const unsigned bits = __ballot_sync(kAllLanes, masked);
    if (lane_id() == 0) peers.masked[base / kWarp] = bits;
  }
  return __syncthreads_and(ok) != 0;
}

// The epoch of the operation that a kernel runs. All threads read it when they enter.
__device__ inline uint64_t ll_epoch(const LlOperation& op, LlKind kind) {
  const LlState& state = ll_state_of(op);
  return (op.phases & kLlSend) != 0 ? state.epoch[kind] + 1 : state.slot_epoch[kind][op.slot];
}

// Whether the last CTA to finish has work: signal that this rank waits no longer, add the time that it waited, or,
// without a send half, signal the consumed words. Counting CTAs takes microseconds, so other kernels do not count them.
__device__ __forceinline__ bool ll_counts_ctas(const LlOperation& op) {
  return op.shrink != 0 || op.wait_cost != 0 || op.phases == kLlReceive;
}

// The signalling warp of each CTA of a send half calls it when all threads of the CTA have entered. The last CTA to
// enter advances the epoch. The first CTA of the grid signals the consumed words of an earlier whole operation. A
// receive half alone touches neither, since CUDA graphs may run it beside a send half.
__device__ inline void ll_begin_send(const LlRun& ll) {
  const LlOperation& op = ll.op;
  LlState& state = ll.state();
  const bool receives = (op.phases & kLlReceive) != 0;
  if (lane_id() == 0 && ptx::atom_add_acq_rel_gpu(&state.ctas_entered[ll.kind], 1) + 1 == gridDim.x) {
    state.ctas_entered[ll.kind] = 0;
    state.epoch[ll.kind] = ll.run.epoch;
    // A whole operation needs no entry. In a replayed graph it would overwrite the entry of an un-received operation.
    if (!receives) state.slot_epoch[ll.kind][op.slot] = ll.run.epoch;
  }
  __syncwarp();
  if (blockIdx.x != 0) return;
  const uint64_t unsignalled = state.unsignalled[ll.kind];
  __syncwarp();  // all lanes have read it
  if (lane_id() == 0) state.unsignalled[ll.kind] = receives && !ll_counts_ctas(op) ? ll.run.epoch : 0;
#pragma unroll 1
  for (int peer = lane_id(); unsignalled != 0 && peer < op.comm.num_ranks; peer += kWarp)
    if (!ll.is_masked(peer))
      peer::signal(ll.block(peer).consumed(ll.kind, ll_parity(unsignalled), op.comm.rank), unsignalled);
  __syncwarp();
}

// --- Batches of tokens whose flags are stored together -------------------------------------------------------------

constexpr int kLlBatchTokens = 8;   // a batch has more tokens only if one group has more
constexpr int kLlMostInBatch = 32;  // the most tokens of a batch: a group of the largest T has this many
static_assert(kLlMaxTokens / kLlMaxGroups <= kLlMostInBatch, "a group fits in a batch");

// The items (groups of tokens) of one CTA, in batches. Every CTA has items cta, cta + gridDim.x, ... The last CTA of
// the grid is cta 0, since the first ones send words.
struct Batches {
  int items;      // items of the kernel
  int per_item;   // most tokens of an item
  int per_batch;  // items of a batch
  int cta;

  __device__ Batches(int items, int per_item)
      : items(items),
        per_item(per_item),
        per_batch(max(1, kLlBatchTokens / per_item)),
        cta(static_cast<int>(gridDim.x - 1 - blockIdx.x)) {}
  __device__ int count() const {
    const int mine = (items - cta + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
    return mine <= 0 ? 0 : (mine + per_batch - 1) / per_batch;
  }
  // The i-th item of a batch; at or past `items`: none.
  __device__ int item(int batch, int i) const { return cta + (batch * per_batch + i) * static_cast<int>(gridDim.x); }
  __device__ int places() const { return per_batch * per_item; }  // places for tokens in a batch
};

// A worker warp calls it when it has written its share of a batch.
__device__ __forceinline__ void count_written(int32_t* written) {
  __syncwarp();
  if (lane_id() == 0) ptx::red_add_release_cta(written, 1);
}
// The signalling warp: waits until all workers have written a batch, and fences. False after a fault.
__device__ inline bool fence_batch(const LlRun& ll, int32_t* written, int batch) {
  const int32_t all = num_workers() * (batch + 1);
  int ok = 1;
  if (lane_id() == 0)
    while (ok && ptx::ld_acquire_cta(written) < all) {
      __nanosleep(40);
      ok = !faulted(ll.op.comm);
    }
  ok = __shfl_sync(kAllLanes, ok, 0);
  __syncwarp();
  if (ok) peer::fence();
  return ok != 0;
}
// All lanes, after the fence: stores the group's flag at each of the ranks base + r for which bit r of `ranks` is set.
__device__ inline void signal_group(const LlRun& ll, int base, uint32_t ranks, int group) {
  const int rank = base + lane_id();
  if (rank < ll.op.comm.num_ranks && (ranks >> lane_id() & 1u) != 0)
    peer::store(ll.block(rank).flag(ll.kind, ll.parity, ll.op.comm.rank, group), ll.run.epoch);
}

// --- Leaving -------------------------------------------------------------------------------------------------------

// All threads of every CTA call it when the CTA's work is done. True in the CTA that is last.
__device__ inline bool ll_last_to_finish(const LlOperation& op, LlKind kind) {
  __shared__ bool last;
  __syncthreads();  // thread 0 releases the writes of all threads
  if (threadIdx.x == 0) {
    uint64_t* done = &ll_state_of(op).ctas_done[kind][(op.phases & kLlSend) != 0 ? 0 : 1];
    last = ptx::atom_add_acq_rel_gpu(done, 1) + 1 == gridDim.x;
    if (last) *done = 0;
  }
  __syncthreads();
  return last;
}

// One warp of the last CTA calls it if the operation succeeded.
__device__ inline void ll_finish(const LlRun& ll) {
  const LlOperation& op = ll.op;
  const Comm& comm = op.comm;
  LlState& state = ll.state();
  if (op.shrink != 0 && lane_id() == 0) ll_announce_wait(ll, false);
  if ((op.phases & kLlReceive) == 0) return;
#pragma unroll 1
  for (int peer = lane_id(); peer < comm.num_ranks; peer += kWarp) {
    if (op.wait_cost != 0) at<int64_t>(op.wait_cost)[peer] += static_cast<int64_t>(state.waited[peer]);
    state.waited[peer] = 0;
    const bool masked = op.shrink != 0 ? ptx::ld_relaxed_gpu(&state.mask[peer]) != 0 : ll.is_masked(peer);
    if (!masked) peer::signal(ll.block(peer).consumed(ll.kind, ll.parity, comm.rank), ll.run.epoch);
  }
}

// All threads of every CTA call it when the CTA's work is done. False in a CTA that must clear the results after a
// fault: the last CTA or, if CTAs are not counted, each CTA that sees the fault.
__device__ inline bool ll_leave(const LlRun& ll, bool ok) {
  const LlOperation& op = ll.op;
  if (!ll_counts_ctas(op)) {
    ok = __syncthreads_and(ok) != 0;  // all results of the CTA are written
    return __syncthreads_and(ok && (threadIdx.x != 0 || !faulted(op.comm))) != 0;
  }
  if (!ll_last_to_finish(op, ll.kind)) return true;
  if (faulted(op.comm)) return false;
  if (warp_id() == 0) ll_finish(ll);
  return true;
}

// --- Launches ------------------------------------------------------------------------------------------------------

inline void require_ll(const LlOperation& op, int64_t image_bytes) {
  const LlHeader& header = op.header;
  require_comm(op.comm);
  require_sms(op.num_sms);
  require((op.phases & ~(kLlSend | kLlReceive)) == 0 && op.phases != 0, "phases", "1 to 3", op.phases);
  require(op.slot >= 0 && op.slot < kLlSlots, "slot", "0 to 3", op.slot);
  require(op.comm.num_experts <= kLlMaxExperts, "num_experts", "at most 32767", op.comm.num_experts);
  require(op.shape.max_tokens >= 0 && op.shape.max_tokens <= kLlMaxTokens, "max_tokens of the communicator",
          "at most 4096", op.shape.max_tokens);
  require(header.topk >= 1 && header.topk <= op.shape.max_topk && header.topk <= kMaxTopk, "topk",
          "1 to the communicator's and 128", header.topk);
  require(header.max_tokens >= 0 && header.max_tokens <= op.shape.max_tokens, "max_tokens",
          "at most that of the communicator", header.max_tokens);
  require(header.num_tokens >= 0 && header.num_tokens <= header.max_tokens, "num_tokens", "at most max_tokens",
          header.num_tokens);
  require(header.row_bytes > 0 && header.row_bytes % kRowAlign == 0, "row_bytes", "a multiple of 16", header.row_bytes);
  require(image_bytes <= op.shape.slot_bytes && op.shape.slot_bytes % kSlotAlign == 0, "slot_bytes",
          "room for a row, a multiple of 128", op.shape.slot_bytes);
}

// The threads of a CTA: enough workers for its tasks, up to `most`, and the signalling warp.
inline int ll_threads(const LlOperation& op, int64_t tasks_of_token, int most) {
  const int64_t tokens = ceil_div(static_cast<int64_t>(op.comm.num_ranks) * op.header.max_tokens, op.num_sms);
  const int64_t tasks = tokens * tasks_of_token;
  const int64_t workers = tasks < kLlLeastWorkers ? kLlLeastWorkers : tasks > most ? most : tasks;
  return static_cast<int>(workers + 1) * kWarp;
}

}  // namespace ep::cuda
