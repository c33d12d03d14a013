// The signals that the ranks of a dispatch or combine send to each other, from the first word to the last:
//
//   consumed   The receiver has read the rows of an epoch. The sender waits for it before it writes the next ones.
//   opening    The sender's header. The receiver compares it with its own before it reads a row.
//   arrival    The rows of one chunk are in the receiver's pool.
//
// Roles. One warp of each sending CTA signals chunks. It waits until the sending warps of its CTA have written all
// their rows of a chunk, then counts its CTA. The CTA that is last signals the chunk to all peers.
// Buffers. The words are in the control block of the rank that waits for them; common/layout.h describes them. State
// has the counts of CTAs.
// Memory order. The signalling warp acquires what the sending warps published (rows.cuh). It fences once at system
// scope for all rows of the chunk, and counts the CTA with acquire and release order at device scope. The last CTA
// stores the arrivals with release order at system scope. So a chunk costs one system fence per CTA, and no sending
// warp waits for it.
#pragma once
#include "cuda/core/peer.cuh"
#include "cuda/moe/rows.cuh"

namespace ep::cuda {

// --- consumed ------------------------------------------------------------------------------------------------------

// All threads of the last CTA share the sources, and signal to them that this rank has read what they wrote.
__device__ inline void signal_consumed(const Run& run, int kind) {
  const Comm& comm = run.comm;
  for (int source = static_cast<int>(threadIdx.x); source < comm.num_ranks; source += static_cast<int>(blockDim.x))
    peer::signal(consumed_word(comm, source, kind, comm.rank), run.epoch);
}

// The lanes of the CTA's last warp share the destinations, and wait until they have read the rows of the previous
// epoch. Other warps return at once. All must call may_send() before they write.
__device__ inline bool destinations_have_read(const Run& run, Pool pool) {
  const Comm& comm = run.comm;
  if (lane_of_last_warp() < 0) return true;
  for (int dest = lane_of_last_warp(); dest < comm.num_ranks; dest += kWarp)
    if (!peer::wait_at_least(run, consumed_word(comm, comm.rank, pool, dest), run.epoch - 1, dest)) return false;
  return true;
}

// All threads call it after destinations_have_read(). Returns whether `ok` is true for all of them. Joins the CTA.
__device__ inline bool may_send(bool ok) {
  ok = __syncthreads_and(ok) != 0;
  ptx::fence_proxy_async();  // the bulk stores that follow overwrite data that the peers have read
  return ok;
}

// --- opening -------------------------------------------------------------------------------------------------------

// One warp of each CTA calls it after may_send(). The warp of CTA 0 signals this rank's header to every destination,
// before the first row.
__device__ inline void open_destinations(const Run& run, Pool pool, const Header& mine) {
  const Comm& comm = run.comm;
  for (int dest = lane_id(); blockIdx.x == 0 && dest < comm.num_ranks; dest += kWarp) {
    Opening* word = opening(comm, dest, pool, comm.rank);
    word->header = mine;
    peer::signal(&word->flag, run.epoch);
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

// Waits for a source's opening and checks it against this rank's header. `src_tokens`: T of each source, or null.
// `counts`: true in one warp of the kernel; the time of that warp counts as waited.
__device__ inline bool open_source(const Run& run, Pool pool, int source, const Header& mine, const int32_t* src_tokens,
                                   bool counts) {
  const Opening* word = opening(run.comm, run.comm.rank, pool, source);
  return peer::wait_at_least(run, &word->flag, run.epoch, source, kPeer, counts) &&
         check_opening(run, word, source, mine, src_tokens == nullptr ? -1 : src_tokens[source]);
}

// One lane of a warp whose lanes share the sources calls open_source() for its own.
__device__ inline bool open_sources_of_lane(const Run& run, Pool pool, const Header& mine, const int32_t* src_tokens,
                                            bool counts) {
  for (int source = lane_id(); source < run.comm.num_ranks; source += kWarp)
    if (!open_source(run, pool, source, mine, src_tokens, counts)) return false;
  return true;
}
// The last warp of the CTA opens all sources. Other warps return true at once. The caller joins the CTA.
__device__ inline bool open_sources(const Run& run, Pool pool, const Header& mine, const int32_t* src_tokens) {
  return lane_of_last_warp() < 0 || open_sources_of_lane(run, pool, mine, src_tokens, blockIdx.x == 0);
}
// Does the same in any one warp, for kernels whose warps have several roles. In CTA 0, the time of the warp `first`
// counts as waited. Joins the warp.
__device__ inline bool open_sources_of_warp(const Run& run, Pool pool, const Header& mine, const int32_t* src_tokens,
                                            int first) {
  const bool counts = blockIdx.x == 0 && warp_id() == first;
  return __all_sync(kAllLanes, open_sources_of_lane(run, pool, mine, src_tokens, counts)) != 0;
}

// --- counts --------------------------------------------------------------------------------------------------------

// One warp waits until notify, ahead in the stream, has the counts of all peers. A reused routing has them already.
// Returns false after a fault. Joins the warp.
__device__ inline bool has_counts(const Run& run, const Header& header) {
  bool ok = true;
  if (header.op == kOpDispatch && lane_id() == 0)
    ok = peer::wait_at_least(run, &state_of(run.comm).counts_ready, run.epoch, run.comm.rank, kOwnKernel);
  ok = __all_sync(kAllLanes, ok) != 0;
  __syncwarp();  // then any lane may read the data that lane 0 has acquired
  return ok;
}

// --- arrival -------------------------------------------------------------------------------------------------------

// Signals to `owner` that rows [begin, end) of this rank's chunk are in its pool.
__device__ inline void signal_chunk(const Run& run, Pool pool, int owner, int chunk, int begin, int end) {
  Arrival* word = arrival(run.comm, owner, pool, run.comm.rank, chunk);
  const uint64_t range = static_cast<uint64_t>(static_cast<uint32_t>(end)) << 32 | static_cast<uint32_t>(begin);
  peer::signal(word, run.epoch, range);
}

// Whether the chunk of `word` has arrived. If so, with acquire order at system scope; the chunk's rows are [begin,
// end).
__device__ __forceinline__ bool has_arrived(const Run& run, const Arrival* word, uint64_t* seen, int32_t* begin,
                                            int32_t* end) {
  *seen = peer::poll(&word->flag);
  if (*seen < run.epoch) return false;
  uint64_t range;
  peer::acquire(word, seen, &range);
  *begin = static_cast<int32_t>(range);
  *end = static_cast<int32_t>(range >> 32);
  return true;
}

// One warp: waits until the `warps` sending warps have written all their rows before number `end`. Returns a number
// before which all rows are written, or -1 after a fault, which ends the sending warps, too.
__device__ inline int32_t wait_written(const Run& run, Progress& progress, int warps, int chunk, int32_t end) {
  Deadline deadline;
  for (;;) {
    const int32_t first = lane_id() < warps ? ptx::ld_acquire_cta(progress.first + lane_id()) : kNoMore;
    const int32_t least = __reduce_min_sync(kAllLanes, first);
    __syncwarp();  // so that lane 0 can release what other lanes have acquired
    if (least >= end) return least;
    int go_on = 1;
    if (lane_id() == 0) go_on = deadline.keep_waiting(run, run.comm.rank, chunk, end, least);
    if (!__shfl_sync(kAllLanes, go_on, 0)) return -1;
  }
}

// One warp, one lane per chunk: counts this CTA for `chunks` chunks from `first` on. Returns a bit for each chunk for
// which this CTA is the last.
__device__ inline unsigned count_cta(const Run& run, Pool pool, int first, int chunks) {
  if (lane_id() == 0) peer::fence();
  __syncwarp();
  bool last = false;
  if (lane_id() < chunks) {
    uint32_t* done = &state_of(run.comm).chunk_done[pool][first + lane_id()];
    last = ptx::atom_add_acq_rel_gpu(done, 1u) + 1 == gridDim.x;
    if (last) *done = 0;
  }
  const unsigned lasts = __ballot_sync(kAllLanes, last);
  __syncwarp();  // so that any lane can release what other lanes have acquired from other CTAs
  return lasts;
}

// The signalling warp of each CTA calls it. All chunks that are ready at the same time share one fence. With a test
// gate, the first chunk is signalled alone. Chunks has
//   int count() const                       the number of chunks of the kernel
//   int32_t end(int chunk) const            the number after the chunk's last row
//   bool may_signal()                       all lanes; may wait: whether peers may be signalled
//   void signal(int peer, int chunk) const  one lane per peer and chunk: signals the peer
template <class Chunks>
__device__ void signal_chunks(const Run& run, Pool pool, Progress& progress, int warps, Chunks chunks) {
  const int count = chunks.count(), R = run.comm.num_ranks;
  for (int first = 0, ready; first < count; first = ready) {
    const int32_t least = wait_written(run, progress, warps, first, chunks.end(first));
    if (least < 0) return;
    const bool alone = first == 0 && run.comm.gate == run.step;
    for (ready = first + 1; !alone && ready < count && ready - first < kWarp && chunks.end(ready) <= least;) ++ready;
    const unsigned last = count_cta(run, pool, first, ready - first);
    if (last == 0) continue;
    const bool may_signal = chunks.may_signal();
    if (__any_sync(kAllLanes, faulted(run.comm))) return;
    if (!may_signal) continue;
    for (int i = lane_id(); i < (ready - first) * R; i += kWarp)
      if (last >> i / R & 1u) chunks.signal(i % R, first + i / R);
    __syncwarp();
    if (first == 0 && lane_id() == 0) hold_at_gate(run);
    __syncwarp();
  }
}

// All threads of the last CTA of a sending kernel that succeeded. If rows were not signalled, the epoch does not
// advance: the host launches the same send again.
__device__ inline void finish_sending(const Run& run, Pool pool, bool signalled = true) {
  if (threadIdx.x == 0) state_of(run.comm).next_row[pool] = 0;
  if (signalled) advance(run);
}

}  // namespace ep::cuda
