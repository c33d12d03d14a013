// How the warps of a sending kernel share its rows, and how it tells peers that the rows of a chunk are there.
//
// Rows are numbered in the order in which they are to arrive; in small batches, where warps are more than rows, the
// parts of rows are. Every warp begins with one of its own and then takes the next number that nobody has taken: SMs
// are not equally far from the links, and with equal shares the fastest are done when the slowest are half way. The
// tokens that add sums are taken likewise.
//
// Roles. A warp that moves rows says, in its CTA's shared memory, up to which number all rows that it took are written.
// One warp more per CTA waits until all of them are past the end of a chunk, chunk by chunk, and counts its CTA in for
// the device; the last CTA tells the peers.
// Memory order. A row is written before the warp says so (bulk stores: complete), with release order in the CTA; the
// warp that waits for it acquires. It then fences once at system scope, for all rows of the chunk, and counts in with
// release at device scope; the last one stores the flags with release at system scope. So a chunk costs one system
// fence per CTA, and no warp that moves rows waits for it.
#pragma once
#include "cuda/core/sync.cuh"

namespace ep::cuda {

constexpr int32_t kNoMore = INT32_MAX;

// Of each warp: the first number that it may have taken and not written, which only grows. In shared memory.
struct Progress {
  int32_t first[kWarp];

  // All threads, before the CTA's next barrier.
  __device__ void clear() {
    if (threadIdx.x < kWarp) first[threadIdx.x] = 0;
  }
};

// Whose rows are counted: a sender's, by Pool, or those that are added.
enum Queue : int32_t { kSent = kDispatchPool, kPushed = kCombinePool, kAdded = 2 };

// Which row a warp takes next: first one of its own, then what nobody has taken.
class NextRow {
 public:
  // Shared by `warps` of each CTA, from `first_warp` on, and by others, which have none of their own.
  __device__ NextRow(const Run& run, Queue queue, int64_t rows, int first_warp, int warps, bool has_own = true)
      : run_(run),
        queue_(queue),
        rows_(static_cast<uint32_t>(rows)),
        own_(static_cast<uint32_t>(warps * gridDim.x)),
        asked_(has_own) {
    if (has_own) answer_ = static_cast<uint32_t>(team_of_warps(first_warp, warps).index) - own_;
  }

  // Begins to ask for the next row. The answer takes its time, and is waited for by next() and ended().
  __device__ void ask() {
    if (asked_) return;
    if (lane_id() == 0) answer_ = ptx::atom_add_relaxed_gpu(&state_of(run_.comm).next_row[queue_], 1);
    asked_ = true;
  }
  // The next row, or kNoMore, then for good.
  __device__ int32_t next() {
    ask();
    const uint32_t row = answer();
    if (row >= rows_) return kNoMore;
    asked_ = false;
    return static_cast<int32_t>(row);
  }
  // Whether it was asked for, and there is none.
  __device__ bool ended() const { return asked_ && answer() >= rows_; }

 private:
  __device__ uint32_t answer() const { return __shfl_sync(kAllLanes, answer_, 0) + own_; }

  const Run& run_;
  const Queue queue_;
  const uint32_t rows_;
  const uint32_t own_;   // of all warps, before those that the counter gives out
  uint32_t answer_ = 0;  // lane 0: what the counter said, so that nothing is done with it before it is needed
  bool asked_;
};

// The rows of one warp of a sender.
class RowQueue {
 public:
  __device__ RowQueue(const NextRow& rows, Progress& progress) : rows_(rows), progress_(progress) {}

  __device__ void ask() { rows_.ask(); }
  __device__ int32_t next() {
    const int32_t row = rows_.next();
    if (row == kNoMore) return kNoMore;
    if (lane_id() == static_cast<int>(given_ % kWarp)) kept_ = row;
    ++given_;
    return row;
  }

  // So many of the rows given are written. What this warp will take next is not known before it takes it: until then it
  // answers for what comes after its last row.
  __device__ void written(uint32_t rows) {
    int32_t first = kNoMore;
    if (rows < given_)
      first = __shfl_sync(kAllLanes, kept_, static_cast<int>(rows % kWarp));
    else if (!rows_.ended())
      first = given_ == 0 ? 0 : 1 + __shfl_sync(kAllLanes, kept_, static_cast<int>((rows - 1) % kWarp));
    if (lane_id() == 0) ptx::raise_release_cta(progress_.first + warp_id(), first);
  }

 private:
  NextRow rows_;
  Progress& progress_;
  int32_t kept_ = 0;  // rows under way, a lane keeps each
  uint32_t given_ = 0;
};

// Tells `owner` that rows [begin, end) of this rank's chunk lie there.
__device__ inline void signal_chunk(const Run& run, Pool pool, int owner, int chunk, int begin, int end) {
  Arrival* word = arrival(run.comm, owner, pool, run.comm.rank, chunk);
  const uint64_t range = static_cast<uint64_t>(static_cast<uint32_t>(end)) << 32 | static_cast<uint32_t>(begin);
  ptx::st_release_sys(word, run.epoch, range);
}

// Whether the chunk of `word` has arrived; then with acquire at system scope, and its rows are [begin, end).
__device__ __forceinline__ bool has_arrived(const Run& run, const Arrival* word, uint64_t* seen, int32_t* begin,
                                            int32_t* end) {
  *seen = ptx::ld_relaxed_sys(&word->flag);
  if (*seen < run.epoch) return false;
  uint64_t range;
  ptx::ld_acquire_sys(word, seen, &range);
  *begin = static_cast<int32_t>(range);
  *end = static_cast<int32_t>(range >> 32);
  return true;
}

// One warp: waits until the `warps` others have written whatever they took of the rows before `end`; then up to which
// row they have. They end by themselves, in a fault too: -1.
__device__ inline int32_t wait_written(const Run& run, Progress& progress, int warps, int chunk, int32_t end) {
  Patience patience;
  for (;;) {
    const int32_t first = lane_id() < warps ? ptx::read_acquire_cta(progress.first + lane_id()) : kNoMore;
    const int32_t least = __reduce_min_sync(kAllLanes, first);
    __syncwarp();  // what any lane has acquired, lane 0 may pass on
    if (least >= end) return least;
    int go_on = 1;
    if (lane_id() == 0) go_on = patience.keep_waiting(run, run.comm.rank, chunk, end, least);
    if (!__shfl_sync(kAllLanes, go_on, 0)) return -1;
  }
}

// One warp: counts this CTA in for `chunks` chunks from `first` on, a lane each. A bit for each of which it is the
// last.
__device__ inline unsigned count_in(const Run& run, Pool pool, int first, int chunks) {
  if (lane_id() == 0) ptx::fence_acq_rel_sys();
  __syncwarp();
  bool last = false;
  if (lane_id() < chunks) {
    uint32_t* done = &state_of(run.comm).chunk_done[pool][first + lane_id()];
    last = ptx::atom_add_acq_rel_gpu(done, 1u) + 1 == gridDim.x;
    if (last) *done = 0;
  }
  const unsigned lasts = __ballot_sync(kAllLanes, last);
  __syncwarp();  // what the lanes have acquired from other CTAs, any lane may pass on
  return lasts;
}

// One warp of each CTA. All chunks that are ready at a time share one fence; at the test gate the first goes alone.
// Chunks has
//   int count() const                       chunks of the kernel
//   int32_t end(int chunk) const            the number after the chunk's last row
//   bool may_tell()                         whether peers may hear of chunks; may wait; called by all lanes
//   void signal(int peer, int chunk) const  tells a peer; called by a lane for each peer and chunk
template <class Chunks>
__device__ void signal_chunks(const Run& run, Pool pool, Progress& progress, int warps, Chunks chunks) {
  const int count = chunks.count(), R = run.comm.num_ranks;
  for (int first = 0, ready; first < count; first = ready) {
    const int32_t least = wait_written(run, progress, warps, first, chunks.end(first));
    if (least < 0) return;
    const bool alone = first == 0 && run.comm.gate == run.step;
    for (ready = first + 1; !alone && ready < count && ready - first < kWarp && chunks.end(ready) <= least;) ++ready;
    const unsigned last = count_in(run, pool, first, ready - first);
    if (last == 0) continue;
    const bool may_tell = chunks.may_tell();
    if (__any_sync(kAllLanes, faulted(run.comm))) return;
    if (!may_tell) continue;
    for (int i = lane_id(); i < (ready - first) * R; i += kWarp)
      if (last >> i / R & 1u) chunks.signal(i % R, first + i / R);
    __syncwarp();
    if (first == 0 && lane_id() == 0) hold_at_gate(run);
    __syncwarp();
  }
}

// The last CTA's end of a sending kernel that went well. Not `told`: the same rows are sent again.
__device__ inline void finish_sending(const Run& run, Pool pool, bool told = true) {
  if (threadIdx.x == 0) state_of(run.comm).next_row[pool] = 0;
  if (told) advance(run);
}

}  // namespace ep::cuda
