// Copies rows, each from one source to several destinations. A job finds the rows and their destinations. The jobs are
// DispatchSendJob and DispatchRecvJob. A job has
//   Next next(bool may_block)                    finds the warp's next row; kNotYet only if it may not block
//   void load(Ring& ring, int unit)              begins to fill the next stage with a unit of the row found last
//   void store(const char* stage, int unit)      lane 0 begins the bulk stores of a unit, in the order of loads
//   void copy_plain()                            plain path: all lanes copy the row found last
//   void completed(uint32_t rows)                this many rows of the warp are written
//   static constexpr bool kSignals               whether completed rows are signalled. If so, the copy waits until
//                                                stores are written; if not, until their stage has been read
//   static constexpr int kStages                 stages of a warp's ring
// Whole warps call all of them. On the bulk path, next() finds `cut.units()` units: a row or, in small batches, one
// part of a row. The list above calls both a row.
//
// Bulk path. Loads run ahead as far as there are stages, also across rows. The stores of a unit end before the stores
// of the next unit begin. More stores in flight would not be faster: they would wait in the links' queues, and delay
// rows that are needed earlier.
#pragma once
#include "cuda/core/ring.cuh"

namespace ep::cuda {

constexpr int kCopyWarps = 8;
constexpr int kMinCopyWarps = 3;
constexpr int kVectorsAtOnce = 8;  // plain path: 16-byte loads in flight per lane

// A unit that a peer may have written.
template <class Unit>
__device__ __forceinline__ Unit load_shared(const Unit* from) {
  const volatile Unit* word = from;
  return *word;
}
template <>
__device__ __forceinline__ int4 load_shared<int4>(const int4* from) {
  return ptx::ld_coherent(from);
}

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

// Fills `bytes` bytes with `value`. A team shares the work: each member begins at unit `first` and takes every
// `step`-th.
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

// One warp copies a row to `offset` bytes past each destination.
__device__ inline void copy_row_plain(const char* from, const uint64_t* dests, int num_dests, int64_t offset,
                                      int64_t row_bytes) {
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
        if (base + i * kWarp < vectors) reinterpret_cast<int4*>(dests[d] + offset)[base + i * kWarp] = held[i];
  }
}

template <class Job>
__device__ void copy_rows_plain(Job& job) {
  uint32_t rows = 0;
  while (job.next(true) == kRow) {
    job.copy_plain();
    job.completed(++rows);
  }
  job.completed(rows);
}

template <class Job>
__device__ void copy_rows_bulk(Job& job, const Run& run, const Cut& cut) {
  Ring<Job::kStages> ring(cut);
  const int units = cut.units();
  int load_unit = 0, store_unit = 0;
  const auto load_next = [&](bool may_block) {
    if (load_unit == 0 && job.next(may_block) != kRow) return false;
    job.load(ring, load_unit);
    load_unit = load_unit + 1 == units ? 0 : load_unit + 1;
    return true;
  };
  while (ring.in_flight() > 0 || load_next(true)) {
    if (!ring.wait(run)) break;
    job.store(ring.stage(ring.taken), store_unit);
    if (lane_id() == 0) ptx::bulk_commit();
    while (ring.in_flight() < Job::kStages && load_next(false)) {
    }
    if (lane_id() == 0) {
      if constexpr (Job::kSignals)
        ptx::bulk_wait<0>();
      else
        ptx::bulk_wait_read<0>();
    }
    __syncwarp();
    ++ring.taken;
    store_unit = store_unit + 1 == units ? 0 : store_unit + 1;
    job.completed(ring.taken / units);
  }
  if (lane_id() == 0) ptx::bulk_wait<0>();  // the rows must be written before the kernel ends
  __syncwarp();
  job.completed(ring.taken / units);
}

template <bool kBulk, class Job>
__device__ __forceinline__ void copy_rows(Job& job, const Run& run, const Cut& cut) {
  if constexpr (kBulk)
    copy_rows_bulk(job, run, cut);
  else
    copy_rows_plain(job);
}

}  // namespace ep::cuda
