// The rows that a receiving warp of dispatch takes: chunk by chunk, in each chunk all sources in turn, this rank first.
//
// Roles. The warps of a kernel form a team and share the rows of every chunk. Each warp polls the arrivals of 32 chunks
// at once, one per lane. An item is one chunk of one source.
// Buffers. The arrivals are in this rank's control block. A chunk's rows are a range of slots of the source's region.
// Memory order. A lane acquires an arrival at system scope; the warp joins and fences the async proxy.
#pragma once
#include "cuda/core/ring.cuh"
#include "cuda/moe/signals.cuh"

namespace ep::cuda {

class ArrivedRows {
 public:
  // `meta.src_tokens` and `meta.recv_offset` must have been checked. `region`: slots of each source's region. `parts`:
  // parts of a row, which next() finds one by one. `skips_own`: leave out this rank's rows for itself.
  __device__ ArrivedRows(const Run& run, const Meta& meta, int32_t region, const Team& team, int parts, bool skips_own)
      : run_(run), meta_(meta), region_(region), team_(team), parts_(parts), skips_own_(skips_own) {
    int chunks = 0;
    for (int source = lane_id(); source < run.comm.num_ranks; source += kWarp)
      chunks = max(chunks, num_chunks(meta.src_tokens[source]));
    items_ = __reduce_max_sync(kAllLanes, chunks) * run.comm.num_ranks;
  }

  // Finds this warp's next slot whose row has arrived. With several parts, part p of slot s is s * parts + p.
  __device__ Next next(bool may_block, int32_t* part) {
    for (;;) {
      if (part_ < part_end_) {
        *part = static_cast<int32_t>(part_);
        part_ += team_.size;
        return kRow;
      }
      if (item_ >= items_) return kEnd;
      const int lane = item_ % kWarp;
      if (!__shfl_sync(kAllLanes, known_, lane)) {
        poll();
        if (!__shfl_sync(kAllLanes, known_, lane)) {
          if (!may_block) return kNotYet;
          if (!wait_for_item(lane)) item_ = items_;
          continue;
        }
      }
      part_ = first_of(team_, static_cast<int64_t>(__shfl_sync(kAllLanes, begin_, lane)) * parts_);
      part_end_ = static_cast<int64_t>(__shfl_sync(kAllLanes, end_, lane)) * parts_;
      deadline_ = Deadline{};
      if (++item_ % kWarp == 0) known_ = 0;
    }
  }

 private:
  __device__ int source_of(int item) const {
    return (run_.comm.rank + item % run_.comm.num_ranks) % run_.comm.num_ranks;
  }
  __device__ int chunk_of(int item) const { return item / run_.comm.num_ranks; }
  __device__ const Arrival* word_of(int item) const {
    return arrival(run_.comm, run_.comm.rank, kDispatchPool, source_of(item), chunk_of(item));
  }

  // Each lane polls one item of the 32 around item_.
  __device__ void poll() {
    const int item = item_ / kWarp * kWarp + lane_id();
    uint64_t seen;
    int32_t begin, end;
    bool found = false;
    if (known_ == 0 && item < items_) {
      const int source = source_of(item), chunk = chunk_of(item);
      if (chunk >= num_chunks(meta_.src_tokens[source]) || (skips_own_ && source == run_.comm.rank)) {
        known_ = 1;
        begin_ = end_ = 0;
      } else if (has_arrived(run_, word_of(item), &seen, &begin, &end)) {
        known_ = 1;
        found = true;
        take(source, chunk, begin, end);
      }
    }
    __syncwarp();
    if (__any_sync(kAllLanes, found)) ptx::fence_proxy_async();
  }

  __device__ void take(int source, int chunk, int32_t begin, int32_t end) {
    const int32_t first = source * region_;
    const int32_t rows = min(meta_.recv_offset[source + 1] - meta_.recv_offset[source], region_);
    begin_ = end_ = 0;
    if (begin < 0 || begin > end || end > rows) {
      fail(run_.comm, kBadData, run_.step, source, chunk, rows, begin < 0 || begin > end ? begin : end);
      return;
    }
    begin_ = first + begin;
    end_ = first + end;
  }

  __device__ bool wait_for_item(int lane) {
    int go_on = 1;
    if (lane_id() == lane)
      go_on = deadline_.keep_waiting(run_, source_of(item_), chunk_of(item_), run_.epoch,
                                     peer::poll(&word_of(item_)->flag));
    return __shfl_sync(kAllLanes, go_on, lane) != 0;
  }

  const Run& run_;
  const Meta& meta_;
  const int32_t region_;
  const Team team_;
  const int parts_;
  const bool skips_own_;
  Deadline deadline_;
  int items_;                        // chunks of all sources
  int item_ = 0;                     // the first item that this warp has not begun
  int64_t part_ = 0, part_end_ = 0;  // the parts that are left of the item before item_
  int known_ = 0;                    // 1: this lane's item has arrived, in slots [begin_, end_)
  int32_t begin_ = 0, end_ = 0;
};

// All threads of the last CTA call it when all chunks have been copied. Returns whether nothing has failed and the
// chunks cover the rows of every source, in order. Writes the ends of chunks to `recv_chunk_end` unless it is null.
__device__ inline bool chunks_cover(const Run& run, const Meta& meta, int32_t* recv_chunk_end) {
  const Comm& comm = run.comm;
  bool ok = !faulted(comm);
  for (int i = threadIdx.x; i < comm.num_ranks * kMaxChunks; i += blockDim.x) {
    const int source = i / kMaxChunks, chunk = i % kMaxChunks, chunks = num_chunks(meta.src_tokens[source]);
    if (chunk >= chunks) continue;
    const Arrival* word = arrival(comm, comm.rank, kDispatchPool, source, chunk);
    const int32_t begin = ptx::ld_coherent(&word->begin), end = ptx::ld_coherent(&word->end);
    const int32_t expected = chunk == 0 ? 0 : ptx::ld_coherent(&(word - 1)->end);
    const int32_t rows = meta.recv_offset[source + 1] - meta.recv_offset[source];
    if (end < begin || end > rows) ok = fail(comm, kBadData, run.step, source, chunk, rows, end);
    if (begin != expected) ok = fail(comm, kBadData, run.step, source, chunk, expected, begin);
    if (chunk + 1 == chunks && end != rows) ok = fail(comm, kBadData, run.step, source, chunk, rows, end);
    if (recv_chunk_end != nullptr) recv_chunk_end[source * kMaxChunks + chunk] = end;
  }
  return __syncthreads_and(ok) != 0;
}

}  // namespace ep::cuda
