// Distributes the rows of a kernel over its warps, and tracks which rows of a sending kernel are written.
//
// Rows are numbered in the order in which they should arrive. In small batches, which have fewer rows than there are
// warps, parts of rows are numbered instead. The first row of each warp is fixed; then the warp takes the next row that
// no warp has taken. SMs are not equally far from the links: with equal shares, the fastest SMs would be idle when the
// slowest are half done. Combine receive shares its tokens in the same way.
//
// Roles. Each sending warp publishes a number in shared memory: all its rows before that number are written. The CTA's
// signalling warp (signals.cuh) reads these numbers.
// Buffers. State::next_row counts the rows that warps have requested. Progress is in shared memory.
// Memory order. A row is written (bulk stores: complete) before its warp publishes, with release order in the CTA.
#pragma once
#include "cuda/core/sync.cuh"

namespace ep::cuda {

constexpr int32_t kNoMore = INT32_MAX;

// By warp: the first row that it may have taken and not written. It only grows.
struct Progress {
  int32_t first[kWarp];

  // All threads, before the CTA's next barrier.
  __device__ void clear() {
    if (threadIdx.x < kWarp) first[threadIdx.x] = 0;
  }
};

// The rows that warps share: the rows that a kernel sends, by Pool, or the tokens that combine receive sums.
enum Queue : int32_t { kDispatchSendRows = kDispatchPool, kCombineSendRows = kCombinePool, kCombineRecvRows = 2 };

// Finds the next row of a warp: first its fixed row, then the next row that no warp has taken.
class NextRow {
 public:
  // In each CTA, `warps` warps from `first_warp` on have a fixed first row. Other warps pass has_own = false.
  __device__ NextRow(const Run& run, Queue queue, int64_t rows, int first_warp, int warps, bool has_own = true)
      : run_(run),
        queue_(queue),
        rows_(static_cast<uint32_t>(rows)),
        own_(static_cast<uint32_t>(warps * gridDim.x)),
        requested_(has_own) {
    if (has_own) taken_ = static_cast<uint32_t>(team_of_warps(first_warp, warps).index) - own_;
  }

  // Requests the next row without waiting for the answer; next() and ended() wait for it.
  __device__ void request() {
    if (requested_) return;
    if (lane_id() == 0) taken_ = ptx::atom_add_relaxed_gpu(&state_of(run_.comm).next_row[queue_], 1);
    requested_ = true;
  }
  // The next row; kNoMore after the last row, also when called again.
  __device__ int32_t next() {
    request();
    const uint32_t row = requested();
    if (row >= rows_) return kNoMore;
    requested_ = false;
    return static_cast<int32_t>(row);
  }
  // Whether a row was requested and there was none left.
  __device__ bool ended() const { return requested_ && requested() >= rows_; }

 private:
  __device__ uint32_t requested() const { return __shfl_sync(kAllLanes, taken_, 0) + own_; }

  const Run& run_;
  const Queue queue_;
  const uint32_t rows_;
  const uint32_t own_;  // number of fixed first rows; the counter starts after them
  uint32_t taken_ = 0;  // lane 0: the counter's value. Read as late as possible, because the atomic is slow
  bool requested_;
};

// The rows of one warp of a sending kernel, with its progress.
class RowQueue {
 public:
  __device__ RowQueue(const NextRow& rows, Progress& progress) : rows_(rows), progress_(progress) {}

  __device__ void request() { rows_.request(); }
  __device__ int32_t next() {
    const int32_t row = rows_.next();
    if (row == kNoMore) return kNoMore;
    if (lane_id() == static_cast<int>(given_ % kWarp)) kept_ = row;
    ++given_;
    return row;
  }

  // Publishes that the first `rows` rows of this warp are written. The warp's next row is not known yet, so it may be
  // any row after its last one.
  __device__ void written(uint32_t rows) {
    int32_t first = kNoMore;
    if (rows < given_)
      first = __shfl_sync(kAllLanes, kept_, static_cast<int>(rows % kWarp));
    else if (!rows_.ended())
      first = given_ == 0 ? 0 : 1 + __shfl_sync(kAllLanes, kept_, static_cast<int>((rows - 1) % kWarp));
    if (lane_id() == 0) ptx::red_max_release_cta(progress_.first + warp_id(), first);
  }

 private:
  NextRow rows_;
  Progress& progress_;
  int32_t kept_ = 0;  // rows in flight, one per lane
  uint32_t given_ = 0;
};

}  // namespace ep::cuda
