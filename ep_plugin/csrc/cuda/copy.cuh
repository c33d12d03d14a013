// Copies rows, each from one place to several, and the small pieces of bytes beside them.
//
// A job says which row comes next and where it goes; send and expand are such jobs. A job has
//   Next next(bool may_block, int32_t* row)    the warp's next row; kNotYet only if it may not block
//   const char* source(int32_t row)
//   int place(int32_t row, uint64_t* dests)    the addresses the row goes to; writes what goes beside the row
//   void completed(uint32_t units)             so many units of this warp are written
// all called by whole warps. A row is `cut.pieces` units on the bulk path, and one on the plain path.
//
// Bulk path: loads run up to two units ahead, across rows; a unit's stores are one bulk group, and the two latest
// groups may be incomplete. Four stages hold these four units, so a stage that is loaded again has no reader left.
#pragma once
#include "ring.cuh"

namespace ep::cuda {

constexpr int kCopyThreads = 256;
constexpr int kCopyWarps = kCopyThreads / kWarp;
constexpr int64_t kLargestPiece = 1 << 16;
constexpr int kLoadsAhead = 2;
constexpr int kStoresBehind = kStages - kLoadsAhead;
constexpr int kVectorsAtOnce = 8;  // plain path: 16-byte loads in flight per lane

template <class Unit>
__device__ __forceinline__ void copy_units(char* to, const char* from, int64_t bytes) {
  const int64_t count = bytes / static_cast<int64_t>(sizeof(Unit));
  for (int64_t i = lane_id(); i < count; i += kWarp)
    reinterpret_cast<Unit*>(to)[i] = ptx::ld_coherent(reinterpret_cast<const Unit*>(from) + i);
}
// One warp copies a few bytes, in the widest units that all three allow.
__device__ inline void copy_bytes(char* to, const char* from, int64_t bytes) {
  const uint64_t low = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | static_cast<uint64_t>(bytes);
  if (low % 16 == 0)
    copy_units<int4>(to, from, bytes);
  else if (low % 4 == 0)
    copy_units<int32_t>(to, from, bytes);
  else
    copy_units<char>(to, from, bytes);
}

// Fills bytes [0, bytes) with `value`, shared out over a team whose member takes every `step`-th unit from `first`.
__device__ inline void fill_bytes(Address address, int64_t bytes, int value, int64_t first, int64_t step) {
  if (address == 0) return;
  const uint64_t low = address | static_cast<uint64_t>(bytes);
  if (low % 16 == 0) {
    const int word = static_cast<int>((value & 0xFF) * 0x01010101u);
    for (int64_t i = first; i < bytes / 16; i += step) at<int4>(address)[i] = make_int4(word, word, word, word);
  } else {
    for (int64_t i = first; i < bytes; i += step) at<char>(address)[i] = static_cast<char>(value);
  }
}

__device__ inline void copy_row_plain(const char* from, const uint64_t* dests, int num_dests, int64_t row_bytes) {
  const int64_t vectors = row_bytes / 16;
  for (int64_t base = lane_id(); base < vectors; base += kWarp * kVectorsAtOnce) {
    int4 held[kVectorsAtOnce];
#pragma unroll
    for (int i = 0; i < kVectorsAtOnce; ++i)
      if (base + i * kWarp < vectors)
        held[i] = ptx::ld_coherent(reinterpret_cast<const int4*>(from) + base + i * kWarp);
    for (int d = 0; d < num_dests; ++d)
#pragma unroll
      for (int i = 0; i < kVectorsAtOnce; ++i)
        if (base + i * kWarp < vectors) reinterpret_cast<int4*>(dests[d])[base + i * kWarp] = held[i];
  }
}

template <class Job>
__device__ void copy_rows_plain(Job& job, const Cut& cut) {
  uint64_t* dests = list_of_warp(cut);
  uint32_t rows = 0;
  int32_t row;
  while (job.next(true, &row) == kRow) {
    const int num_dests = job.place(row, dests);
    copy_row_plain(job.source(row), dests, num_dests, cut.row_bytes);
    job.completed(++rows);
  }
}

// Rows whose loads were issued and whose stores were not, oldest first; a lane keeps each.
struct RowQueue {
  int32_t kept = 0;
  uint32_t pushed = 0, popped = 0;
  __device__ void push(int32_t row) {
    if (lane_id() == static_cast<int>(pushed % kWarp)) kept = row;
    ++pushed;
  }
  __device__ int32_t pop() { return __shfl_sync(kAllLanes, kept, static_cast<int>(popped++ % kWarp)); }
};

template <class Job>
__device__ void copy_rows_bulk(Job& job, const Run& run, const Cut& cut) {
  Ring ring(cut);
  RowQueue queue;
  uint64_t* dests = list_of_warp(cut);
  const char* source = nullptr;
  int load_piece = 0, store_piece = 0, num_dests = 0;
  for (;;) {
    while (ring.loading() < kLoadsAhead) {
      if (load_piece == 0) {
        int32_t row;
        if (job.next(ring.loading() == 0, &row) != kRow) break;
        queue.push(row);
        source = job.source(row);
      }
      ring.load(source + cut.piece_begin(load_piece), cut.piece_size(load_piece));
      load_piece = load_piece + 1 == cut.pieces ? 0 : load_piece + 1;
    }
    if (ring.loading() == 0) break;
    if (store_piece == 0) num_dests = job.place(queue.pop(), dests);
    const char* stage = ring.wait(run);
    if (stage == nullptr) break;
    if (lane_id() == 0) {
      for (int d = 0; d < num_dests; ++d)
        ptx::bulk_store(reinterpret_cast<char*>(dests[d]) + cut.piece_begin(store_piece), stage,
                        static_cast<uint32_t>(cut.piece_size(store_piece)));
      ptx::bulk_commit();
      ptx::bulk_wait<kStoresBehind>();
    }
    __syncwarp();
    ++ring.taken;
    store_piece = store_piece + 1 == cut.pieces ? 0 : store_piece + 1;
    if (ring.taken > kStoresBehind) job.completed(ring.taken - kStoresBehind);
  }
  if (lane_id() == 0) ptx::bulk_wait<0>();
  __syncwarp();
  ptx::fence_proxy_async();
  job.completed(ring.taken);
}

template <bool kBulk, class Job>
__device__ __forceinline__ void copy_rows(Job& job, const Run& run, const Cut& cut) {
  if constexpr (kBulk)
    copy_rows_bulk(job, run, cut);
  else
    copy_rows_plain(job, cut);
}

}  // namespace ep::cuda
