// One warp's ring of stages in shared memory. Bulk loads fill it several units ahead of their use. A unit is a row, or
// an equal piece of a row that is longer than a stage or that several warps share.
//
// Roles. One lane issues a load. All lanes wait for a stage, so that all may read it. A stage is filled again after the
// caller has finished with it: readers have joined their warp, and bulk stores from it are complete.
// Memory order. The mbarrier of a stage makes the loaded bytes visible to every lane that waited for it.
#pragma once
#include "cuda/core/sync.cuh"

namespace ep::cuda {

// How rows are cut and what a warp needs of shared memory; computed by the host from the launch's limits.
struct Cut {
  int32_t bytes;        // of a row, with what travels beside it
  int32_t warps;        // of a CTA, that have a ring each
  int32_t pieces;       // of a row
  int32_t piece_bytes;  // all but the last, a multiple of 16
  int32_t stage_bytes;
  int32_t stages;            // of a warp: its ring's, and others that the caller fills
  int32_t list_entries;      // of the caller's list, per warp
  int32_t first_warp = 0;    // of the CTA's, with a ring of this cut
  int64_t shared_begin = 0;  // where its shared memory begins, a multiple of kSlotAlign
  int32_t parts = 1;         // of a row, which warps take one by one: 1, or as many as pieces

  EP_HD int units() const { return parts == 1 ? pieces : 1; }  // of a part
  EP_HD int32_t piece_begin(int piece) const { return piece * piece_bytes; }
  EP_HD int32_t piece_size(int piece) const {
    const int32_t left = bytes - piece_begin(piece);
    return left < piece_bytes ? left : piece_bytes;
  }
  EP_HD int64_t bytes_of_warp() const { return stages * (static_cast<int64_t>(stage_bytes) + 8) + 8 * list_entries; }
  // A warp's shared memory: stages of all warps, then their barriers, then a list of 8-byte entries for each warp.
  EP_HD int64_t shared_bytes() const { return warps * bytes_of_warp(); }
};

// Cuts a row into equal pieces of at most `largest` bytes, a multiple of `unit`.
inline Cut cut_row(int64_t bytes, int64_t largest, int warps, int stages, int list_entries, int64_t unit = kRowAlign) {
  const int32_t pieces = static_cast<int32_t>(ceil_div(bytes, largest / unit * unit));
  Cut cut{static_cast<int32_t>(bytes), warps, pieces, 0, 0, stages, list_entries};
  cut.piece_bytes = static_cast<int32_t>(align_up(ceil_div(bytes, cut.pieces), unit));
  cut.stage_bytes = static_cast<int32_t>(align_up(cut.piece_bytes, kSlotAlign));
  return cut;
}

// The fewest pieces with which at least `least` warps have their rings; then as many warps as fit, up to `most`.
inline Cut cut_for_warps(int64_t bytes, int least, int most, int stages, int list_entries, int64_t shared_bytes) {
  const int64_t room = (shared_bytes / least - 8 * (stages + list_entries)) / stages / kSlotAlign * kSlotAlign;
  Cut cut = cut_row(bytes, room, least, stages, list_entries);
  cut.warps =
      static_cast<int32_t>(shared_bytes / cut.bytes_of_warp() < most ? shared_bytes / cut.bytes_of_warp() : most);
  return cut;
}

// Batches of so many tokens have fewer rows than warps that could move them: their rows are moved in parts.
constexpr int kTokensInParts = 1024;
constexpr int64_t kPartBytes = 4096;  // smaller ones keep an SM busier than the links

// A row in parts of about kPartBytes, the first of which holds the head. Unlike rows, they take room for most warps.
inline Cut cut_in_parts(int64_t bytes, int64_t head, int most, int stages, int list_entries, int64_t shared_bytes) {
  const int64_t parts = bytes / kPartBytes < 1 ? 1 : bytes / kPartBytes;
  const int64_t largest = align_up(ceil_div(bytes, parts), kSlotAlign);
  Cut cut =
      cut_row(bytes, largest > head ? largest : align_up(head + 1, kSlotAlign), most, stages, list_entries, kSlotAlign);
  cut.parts = cut.pieces;
  if (cut.shared_bytes() > shared_bytes) cut.warps = static_cast<int32_t>(shared_bytes / cut.bytes_of_warp());
  return cut;
}

// Without bulk copies there are no stages, and a row is one piece.
inline Cut uncut(int64_t bytes, int warps, int list_entries) {
  return Cut{static_cast<int32_t>(bytes), warps, 1, static_cast<int32_t>(bytes), 0, 0, list_entries};
}

extern __shared__ __align__(128) char dynamic_shared[];

// This warp's number among those with a ring of this cut.
__device__ __forceinline__ int warp_in(const Cut& cut) { return warp_id() - cut.first_warp; }

__device__ __forceinline__ char* stages_of_warp(const Cut& cut) {
  return dynamic_shared + cut.shared_begin + static_cast<int64_t>(warp_in(cut)) * cut.stages * cut.stage_bytes;
}
__device__ __forceinline__ uint64_t* list_of_warp(const Cut& cut) {
  char* lists =
      dynamic_shared + cut.shared_begin + static_cast<int64_t>(cut.warps) * cut.stages * (cut.stage_bytes + 8);
  return reinterpret_cast<uint64_t*>(lists) + warp_in(cut) * cut.list_entries;
}

template <int kStages>
struct Ring {
  char* stages;
  uint64_t* full;
  int stage_bytes;
  uint32_t issued = 0;  // units whose loads were issued
  uint32_t taken = 0;   // units that the caller is done with

  // One warp calls it; the barriers are its own, so its own join is enough.
  __device__ explicit Ring(const Cut& cut) : stages(stages_of_warp(cut)), stage_bytes(cut.stage_bytes) {
    char* barriers = dynamic_shared + cut.shared_begin + static_cast<int64_t>(cut.warps) * cut.stages * stage_bytes;
    full = reinterpret_cast<uint64_t*>(barriers) + warp_in(cut) * cut.stages;
    if (lane_id() == 0) {
      for (int s = 0; s < kStages; ++s) ptx::mbarrier_init(full + s, 1);
      ptx::fence_mbarrier_init();
      ptx::fence_proxy_async();
    }
    __syncwarp();
  }

  __device__ __forceinline__ int loading() const { return static_cast<int>(issued - taken); }
  __device__ __forceinline__ char* stage(uint32_t unit) const { return stages + unit % kStages * stage_bytes; }

  // One lane: begins to fill the stage of a unit, from its byte `skip` on.
  __device__ __forceinline__ void fill(uint32_t unit, const char* from, int64_t bytes, int64_t skip = 0) const {
    uint64_t* barrier = full + unit % kStages;
    ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(bytes));
    ptx::bulk_load(stage(unit) + skip, from, static_cast<uint32_t>(bytes), barrier);
  }
  // All lanes: the next unit.
  __device__ __forceinline__ void load(const char* from, int64_t bytes, int64_t skip = 0) {
    if (lane_id() == 0) fill(issued, from, bytes, skip);
    ++issued;
  }

  // All lanes: waits until the oldest unit that is not taken lies in its stage. A load of this device's memory ends by
  // itself; should it not, the deadline does: false. Other faults do not end this wait, so that no CTA leaves with
  // loads under way.
  __device__ __forceinline__ bool wait(const Run& run) const {
    uint64_t* barrier = full + taken % kStages;
    const uint32_t parity = taken / kStages % 2;
    return __all_sync(kAllLanes, ptx::mbarrier_try_wait(barrier, parity)) || wait_longer(run, barrier, parity);
  }

 private:
  static __device__ bool wait_longer(const Run& run, uint64_t* barrier, uint32_t parity) {
    const uint64_t since = ptx::globaltimer();
    bool ok = true;
    while (ok && !ptx::mbarrier_try_wait(barrier, parity))
      if (ptx::globaltimer() - since > static_cast<uint64_t>(run.comm.timeout_ns))
        ok = fail(run.comm, kTimeout, run.step, run.comm.rank, 1, 1, 0);
    return __all_sync(kAllLanes, ok) != 0;
  }
};

// What asking for the next row may answer.
enum Next { kRow, kNotYet, kEnd };

}  // namespace ep::cuda
