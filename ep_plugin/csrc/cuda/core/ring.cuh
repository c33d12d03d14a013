// How rows are cut into units, and one warp's ring of stages in shared memory. Bulk loads fill the ring several units
// ahead of their use. A unit is a row, or an equal piece of a row that is longer than a stage or that several warps
// share.
//
// Roles. One lane issues a load. All lanes wait for a stage, so that all may read it. A stage may be filled again when
// its readers have joined their warp and bulk stores from it are complete; the caller makes sure of both.
// Buffers. Dynamic shared memory has, for each set of warps with one Cut: the stages of all warps, then an mbarrier for
// each stage, then a list of 8-byte entries for each warp.
// Memory order. The mbarrier of a stage makes the loaded bytes visible to every lane that has waited for it.
#pragma once
#include "cuda/core/sync.cuh"

namespace ep::cuda {

// How rows are cut into pieces, and how much shared memory the warps need. The host computes it for a launch.
struct Cut {
  int32_t bytes;        // bytes of a row, with its head
  int32_t warps;        // warps of a CTA, each with its own ring
  int32_t pieces;       // pieces of a row
  int32_t piece_bytes;  // bytes of each piece but the last; a multiple of 16
  int32_t stage_bytes;
  int32_t stages;            // stages of a warp, whether a ring or the caller fills them
  int32_t list_entries;      // entries of a warp's list, which the caller fills
  int32_t first_warp = 0;    // first warp of the CTA with this cut
  int64_t shared_begin = 0;  // where the warps' shared memory begins; a multiple of kSlotAlign
  int32_t parts = 1;         // parts of a row, which warps take one by one: 1, or `pieces`

  EP_HD int units() const { return parts == 1 ? pieces : 1; }  // units of a part
  EP_HD int32_t piece_begin(int piece) const { return piece * piece_bytes; }
  EP_HD int32_t piece_size(int piece) const {
    const int32_t left = bytes - piece_begin(piece);
    return left < piece_bytes ? left : piece_bytes;
  }
  EP_HD int64_t bytes_of_warp() const { return stages * (static_cast<int64_t>(stage_bytes) + 8) + 8 * list_entries; }
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

// Cuts a row into the fewest pieces with which `least` warps have rings. Then takes as many warps as fit, up to `most`.
inline Cut cut_for_warps(int64_t bytes, int least, int most, int stages, int list_entries, int64_t shared_bytes) {
  const int64_t room = (shared_bytes / least - 8 * (stages + list_entries)) / stages / kSlotAlign * kSlotAlign;
  Cut cut = cut_row(bytes, room, least, stages, list_entries);
  cut.warps =
      static_cast<int32_t>(shared_bytes / cut.bytes_of_warp() < most ? shared_bytes / cut.bytes_of_warp() : most);
  return cut;
}

// Batches of at most this many tokens have fewer rows than there are warps, so warps share rows in parts.
constexpr int kTokensInParts = 1024;
constexpr int64_t kPartBytes = 4096;  // with smaller parts, SMs have more work than the links

// Cuts a row into parts of about kPartBytes. The first part has the whole head. `most` warps if they fit.
inline Cut cut_in_parts(int64_t bytes, int64_t head, int most, int stages, int list_entries, int64_t shared_bytes) {
  const int64_t parts = bytes / kPartBytes < 1 ? 1 : bytes / kPartBytes;
  const int64_t largest = align_up(ceil_div(bytes, parts), kSlotAlign);
  Cut cut =
      cut_row(bytes, largest > head ? largest : align_up(head + 1, kSlotAlign), most, stages, list_entries, kSlotAlign);
  cut.parts = cut.pieces;
  if (cut.shared_bytes() > shared_bytes) cut.warps = static_cast<int32_t>(shared_bytes / cut.bytes_of_warp());
  return cut;
}

// For the plain path: no stages, and a row is one piece.
inline Cut uncut(int64_t bytes, int warps, int list_entries) {
  return Cut{static_cast<int32_t>(bytes), warps, 1, static_cast<int32_t>(bytes), 0, 0, list_entries};
}

extern __shared__ __align__(128) char dynamic_shared[];

// This warp's number among the warps of this cut.
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
  uint32_t taken = 0;   // units that the caller has used

  // One warp calls it. No other warp uses its barriers, so joining the warp is enough.
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

  __device__ __forceinline__ int in_flight() const { return static_cast<int>(issued - taken); }
  __device__ __forceinline__ char* stage(uint32_t unit) const { return stages + unit % kStages * stage_bytes; }

  // One lane: begins to fill a unit's stage, from the stage's byte `skip` on.
  __device__ __forceinline__ void fill(uint32_t unit, const char* from, int64_t bytes, int64_t skip = 0) const {
    uint64_t* barrier = full + unit % kStages;
    ptx::mbarrier_arrive_expect_tx(barrier, static_cast<uint32_t>(bytes));
    ptx::bulk_load(stage(unit) + skip, from, static_cast<uint32_t>(bytes), barrier);
  }
  // All lanes: begins to load the next unit.
  __device__ __forceinline__ void load(const char* from, int64_t bytes, int64_t skip = 0) {
    if (lane_id() == 0) fill(issued, from, bytes, skip);
    ++issued;
  }

  // All lanes: waits until the oldest unit that is not taken is in its stage. Loads of this device's memory end by
  // themselves. If one does not, the wait returns false at the deadline. Other faults do not end this wait, because a
  // CTA must not exit with loads in flight.
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

// The result of a job's next(): a row, none yet, or the end of the rows.
enum Next { kRow, kNotYet, kEnd };

}  // namespace ep::cuda
