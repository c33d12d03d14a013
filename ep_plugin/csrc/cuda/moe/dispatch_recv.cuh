// A receiving warp of dispatch, and the steps before and after it. dispatch_recv.cu and dispatch.cu are the kernels;
// their headers describe roles and memory order.
#pragma once
#include "cuda/core/copy.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/moe/chunks.cuh"
#include "cuda/moe/handle.cuh"

namespace ep::cuda {

// The outputs of one dispatch and what all warps need to find their rows.
struct Output {
  const Run& run;
  const DispatchRecvArgs& args;
  Meta meta;
  SlotLayout lay;
  bool flat;
  int per_rank;
  int64_t required;  // rows that the layout needs
  int32_t region;    // slots of each source's region in the pool

  __device__ Output(const Run& run, const DispatchRecvArgs& args)
      : run(run), args(args), meta(meta_of(args.comm, args.routing)), lay(slot_layout_of(args.header)) {
    flat = args.routing.layout == kFlat;
    per_rank = local_experts(args.comm);
    required = rows_required(args, meta);
    region = region_slots_of(args.comm, args.header);
  }
};

// Writes the output rows of one slot at a time, once the slot's head can be read. One warp uses it.
class RowWriter {
 public:
  static constexpr bool kDirect = true;

  // `dests`: room for list_size() addresses.
  __device__ RowWriter(const Output& out, uint64_t* dests) : out_(out), dests_(dests) {}

  static __host__ __device__ int list_size(const Routing& routing) {
    return routing.layout == kFlat ? routing.topk : 1;
  }

  // All lanes: stores a piece of the row to its output rows; lane 0 begins the bulk stores. The row is number
  // `position` of the rows that `source` sent here. `unit` counts the pieces of the row that this warp stores, in
  // order. `head`: the head of the row's slot.
  __device__ void store(int source, int32_t position, const char* head, const char* stage, int piece, int unit,
                        const Cut& cut) {
    const int64_t skip = piece == 0 ? out_.lay.row : 0;
    if (unit == 0) num_dests_ = list_rows(source, position, head, piece == 0);
    if (lane_id() == 0)
      for (int d = 0; d < num_dests_; ++d)
        ptx::bulk_store(reinterpret_cast<char*>(dests_[d]) + (cut.piece_begin(piece) + skip - out_.lay.row),
                        stage + skip, static_cast<uint32_t>(cut.piece_size(piece) - skip));
  }

  // All lanes: stores a whole row to its output rows on the plain path. The slot is at `head`.
  __device__ void copy_plain(int source, int32_t position, const char* head) {
    num_dests_ = list_rows(source, position, head, true);
    copy_row_plain(head + out_.lay.row, dests_, num_dests_, 0, out_.args.header.row_bytes);
  }

 private:
  // Lists the addresses of a slot's output rows and returns how many there are. If `writes`, also writes their expert
  // ids, weights and scales, and the routing's recv_rows if it is fresh. `head`: in the pool or in shared memory.
  __device__ int list_rows(int source, int32_t position, const char* head, bool writes) const {
    __syncwarp();
    const int count =
        out_.flat ? list_flat_rows(source, position, head, writes) : list_token_row(source, position, head, writes);
    __syncwarp();
    return count;
  }

  // The local id of the pair's expert; -1 if another rank holds it or the pair is dropped. An invalid id is a fault.
  __device__ int32_t local_id(int source, const char* head, int k) const {
    const Comm& comm = out_.args.comm;
    const int32_t id = ptx::ld_coherent(reinterpret_cast<const int32_t*>(head + out_.lay.ids) + k);
    if (id < -1 || id >= comm.num_experts) fail(comm, kBadData, kDispatchRecv, source, k, comm.num_experts, id);
    const int32_t local = id - comm.rank * out_.per_rank;
    return local >= 0 && local < out_.per_rank ? local : -1;
  }

  // One lane per pair lists its FLAT row. Rows past the capacity are dropped.
  __device__ int list_flat_rows(int source, int32_t position, const char* head, bool writes) const {
    const DispatchRecvArgs& args = out_.args;
    const int32_t* base = out_.meta.flat_base + place_of(source, position) * out_.per_rank;
    const int K = args.routing.topk;
    int count = 0;
    for (int k = lane_id(); k - lane_id() < K; k += kWarp) {
      const int32_t local = k < K ? local_id(source, head, k) : -1;
      const int32_t row = local >= 0 ? sum_of(base[local], position_in(head, k)) : -1;
      const bool in_range = local < 0 || (row >= 0 && row < out_.required);
      if (!in_range) fail(args.comm, kBadData, kDispatchRecv, source, k, out_.required, row);
      const bool kept = in_range && row >= 0 && row < args.capacity;
      if (writes && args.fresh && k < K) recv_rows(source, position)[k] = kept ? row : -1;
      const unsigned mask = __ballot_sync(kAllLanes, kept);
      if (kept) {
        dests_[count + __popc(mask & ((1u << lane_id()) - 1u))] = args.tokens + row * args.header.row_bytes;
        if (writes) at<int32_t>(args.row_expert_ids)[row] = local;
        if (writes && args.header.weight_bytes != 0) at<float>(args.weights)[row] = weight_in(head, k);
      }
      count += __popc(mask);
      if (!writes || args.header.scale_bytes == 0) continue;
      for (unsigned left = mask; left != 0; left &= left - 1)
        copy_scales(head, __shfl_sync(kAllLanes, row, __ffs(left) - 1));
    }
    return count;
  }

  __device__ int list_token_row(int source, int32_t position, const char* head, bool writes) const {
    const DispatchRecvArgs& args = out_.args;
    const int K = args.routing.topk;
    const int32_t row = sum_of(out_.meta.token_base[place_of(source, position)], position);
    const bool kept = row >= 0 && row < args.capacity;
    for (int k = lane_id(); writes && k < K; k += kWarp) {
      const int32_t local = local_id(source, head, k);
      if (args.fresh) recv_rows(source, position)[k] = kept && local >= 0 ? row : -1;
      if (!kept) continue;
      const int64_t pair = static_cast<int64_t>(row) * K + k;
      store_id(args, pair, local);
      if (args.header.weight_bytes != 0) at<float>(args.weights)[pair] = local < 0 ? 0.0f : weight_in(head, k);
    }
    if (!kept) return 0;
    if (lane_id() == 0) dests_[0] = args.tokens + row * args.header.row_bytes;
    if (writes && args.header.scale_bytes != 0) copy_scales(head, row);
    return 1;
  }

  // source * O + origin of the row, which is number `position` of the rows of `source`.
  __device__ int64_t place_of(int source, int32_t position) const {
    const Comm& comm = out_.args.comm;
    return static_cast<int64_t>(source) * comm.num_origins + origin_of(comm, out_.meta, source, position);
  }

  // The position comes from a peer or from a handle, so the sum may wrap. The caller checks it.
  static __device__ int32_t sum_of(int32_t base, int32_t position) {
    return static_cast<int32_t>(static_cast<uint32_t>(base) + static_cast<uint32_t>(position));
  }
  __device__ int32_t position_in(const char* head, int k) const {
    return ptx::ld_coherent(reinterpret_cast<const int32_t*>(head + out_.lay.positions) + k);
  }
  __device__ float weight_in(const char* head, int k) const {
    return ptx::ld_coherent(reinterpret_cast<const float*>(head + out_.lay.weights) + k);
  }
  __device__ int32_t* recv_rows(int source, int32_t position) const {
    const int64_t slot = out_.meta.recv_offset[source] + position;
    return at<int32_t>(out_.args.routing.recv_rows) + slot * out_.args.routing.topk;
  }
  __device__ void copy_scales(const char* head, int64_t row) const {
    const int64_t bytes = out_.args.header.scale_bytes;
    copy_bytes(at<char>(out_.args.scales, row * bytes), head + out_.lay.scales, bytes);
  }

  const Output& out_;
  uint64_t* const dests_;
  int num_dests_ = 0;
};

// The rows that one warp receives: a job of copy_rows() (copy.cuh). `skips_own`: this rank's rows for itself do not
// come through the pool.
class DispatchRecvJob {
 public:
  static constexpr bool kSignals = false;
  static constexpr int kStages = 4;

  __device__ DispatchRecvJob(const Output& out, const Cut& cut, bool skips_own)
      : out_(out),
        cut_(cut),
        rows_(out.run, out.meta, out.region, team_of_warps(cut.first_warp, cut.warps), cut.parts, skips_own),
        writer_(out, list_of_warp(cut)) {}

  __device__ Next next(bool may_block) {
    const Next found = rows_.next(may_block, &part_);
    if (found != kRow) return found;
    if (lane_id() == static_cast<int>(found_ % kWarp)) kept_ = part_;
    ++found_;
    return kRow;
  }

  __device__ void load(Ring<kStages>& ring, int unit) const {
    const int piece = first_piece(part_) + unit;
    const int64_t begin = cut_.piece_begin(piece), skip = piece == 0 ? out_.lay.ids : 0;
    ring.load(slot(slot_of(part_)) + (begin + skip), cut_.piece_size(piece) - skip, skip);
  }

  __device__ void store(const char* stage, int unit) {
    const int32_t part = __shfl_sync(kAllLanes, kept_, static_cast<int>(stored_ % kWarp));
    const int piece = first_piece(part) + unit;
    const int32_t found = slot_of(part);
    writer_.store(source_of(found), found % out_.region, first_piece(part) == 0 ? stage : slot(found), stage, piece,
                  unit, cut_);
    stored_ += unit + 1 == cut_.units();
  }

  __device__ void copy_plain() { writer_.copy_plain(source_of(part_), part_ % out_.region, slot(part_)); }

  __device__ void completed(uint32_t) const {}

 private:
  __device__ int32_t slot_of(int32_t part) const { return cut_.parts == 1 ? part : part / cut_.parts; }
  __device__ int first_piece(int32_t part) const { return cut_.parts == 1 ? 0 : part % cut_.parts; }
  __device__ int source_of(int32_t slot) const { return slot / out_.region; }
  __device__ const char* slot(int32_t index) const {
    return at<char>(peer::pool(out_.args.comm, kDispatchPool, out_.args.comm.rank), index * out_.lay.bytes);
  }

  const Output& out_;
  const Cut& cut_;
  ArrivedRows rows_;
  RowWriter writer_;
  int32_t part_ = 0;  // the slot, or the part of a slot, found last
  int32_t kept_ = 0;  // parts in flight, one per lane
  uint32_t found_ = 0, stored_ = 0;
};

// One warp clears an output row for which nothing was sent.
__device__ inline void clear_row(const Output& out, int64_t row) {
  const DispatchRecvArgs& args = out.args;
  const int64_t row_bytes = args.header.row_bytes, scale_bytes = args.header.scale_bytes, K = args.routing.topk;
  const int64_t weight_bytes = args.header.weight_bytes * (out.flat ? 1 : K);
  fill_bytes(args.tokens + row * row_bytes, row_bytes, 0, lane_id(), kWarp);
  if (scale_bytes != 0) fill_bytes(args.scales + row * scale_bytes, scale_bytes, 0, lane_id(), kWarp);
  if (weight_bytes != 0) fill_bytes(args.weights + row * weight_bytes, weight_bytes, 0, lane_id(), kWarp);
  if (args.row_expert_ids != 0) fill_bytes(args.row_expert_ids + row * 4, 4, 0xFF, lane_id(), kWarp);
  const int64_t ids_bytes = id_bytes_of(args) * K;
  if (args.topk_ids != 0) fill_bytes(args.topk_ids + row * ids_bytes, ids_bytes, 0xFF, lane_id(), kWarp);
}

// A team of warps clears the output rows for which nothing is sent.
__device__ inline void clear_padding(const Output& out, const Team& team) {
  const int64_t capacity = out.args.capacity;
  for (int64_t local = team.index; out.flat && local < out.per_rank; local += team.size) {
    const int64_t begin = static_cast<int64_t>(out.meta.expert_offset[local]) + out.meta.expert_rows[local];
    const int64_t end = min(static_cast<int64_t>(out.meta.expert_offset[local + 1]), capacity);
    for (int64_t row = begin; row < end; ++row) clear_row(out, row);
  }
  if (out.args.optimistic != 0) return;
  for (int64_t row = out.required + team.index; row < capacity; row += team.size) clear_row(out, row);
}

// Writes the tables of counts and offsets that the caller reads. `step` threads call it; this thread is number `first`.
__device__ inline void write_tables(const Output& out, int first, int step) {
  const DispatchRecvArgs& args = out.args;
  const int64_t capacity = args.capacity;
  int32_t* count = at<int32_t>(args.expert_count);
  int32_t* offsets = at<int32_t>(args.expert_offset);
  for (int local = first; local <= out.per_rank; local += step) {
    const int64_t offset = out.meta.expert_offset[local];
    offsets[local] = static_cast<int32_t>(out.flat ? min(offset, capacity) : offset);
    if (local == out.per_rank) continue;
    const int64_t rows = out.meta.expert_rows[local];
    count[local] = static_cast<int32_t>(out.flat ? max(min(capacity - offset, rows), static_cast<int64_t>(0)) : rows);
  }
  if (first != 0 || args.overflow == 0) return;
  at<int32_t>(args.overflow)[0] = out.required > capacity;
  at<int32_t>(args.overflow)[1] = static_cast<int32_t>(out.required);
  for (int i = 0; i < kRailOverflowWords; ++i) at<int32_t>(args.overflow)[2 + i] = out.meta.rail_overflow[i];
}

// After a fault, the last CTA fills the outputs. All other CTAs have finished.
__device__ inline void poison(const DispatchRecvArgs& args) {
  const int64_t first = threadIdx.x, step = blockDim.x, capacity = args.capacity, K = args.routing.topk;
  const int64_t weights = args.header.weight_bytes * (args.routing.layout == kFlat ? 1 : K);
  const int64_t experts = local_experts(args.comm);
  fill_bytes(args.tokens, capacity * args.header.row_bytes, 0xFF, first, step);
  fill_bytes(args.scales, capacity * args.header.scale_bytes, 0xFF, first, step);
  fill_bytes(args.weights, capacity * weights, 0xFF, first, step);
  fill_bytes(args.topk_ids, capacity * K * id_bytes_of(args), 0xFF, first, step);
  fill_bytes(args.row_expert_ids, capacity * 4, 0xFF, first, step);
  fill_bytes(args.expert_count, experts * 4, 0, first, step);
  fill_bytes(args.expert_offset, (experts + 1) * 4, 0, first, step);
  fill_bytes(args.overflow, 4 * (2 + kRailOverflowWords), 0, first, step);
}

// All threads call it. Returns whether all received rows fit in the pool and in the handle's recv_rows, and a reused
// handle is sound. Every CTA finds the same result. One thread records the fault.
__device__ inline bool slots_fit(const Run& run, const DispatchRecvArgs& args) {
  const Comm& comm = args.comm;
  const Meta meta = meta_of(comm, args.routing);
  if (args.header.op == kOpCachedDispatch &&
      !check_handle(run, cached_items(comm), [&](int item) { return cached_is_sound(comm, args.routing, meta, item); }))
    return false;
  const int64_t slots = meta.recv_offset[args.comm.num_ranks];
  if (pools_must_grow(args.comm, args.header, meta)) return threadIdx.x == 0 && fail_too_small(run, args.header, meta);
  return slots <= args.routing.slots ||
         (threadIdx.x == 0 && fail(args.comm, kTooSmall, run.step, args.comm.rank, 1, args.routing.slots, slots));
}

// All threads of the last CTA call it when all CTAs have finished.
__device__ inline void finish_dispatch_recv(const Run& run, const DispatchRecvArgs& args, const Meta& meta) {
  if (!chunks_cover(run, meta, args.fresh ? meta.recv_chunk_end : nullptr)) return poison(args);
  signal_consumed(run, kDispatchPool);
  advance(run);
}

inline void require_dispatch_recv(const DispatchRecvArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_header(args.header, args.routing);
  require_sms(args.num_sms);
  require_rows("tokens", args.tokens);
  if (args.capacity > 0) {
    require(args.header.weight_bytes == 0 || args.weights != 0, "weights", "an address", 0);
    require(args.header.scale_bytes == 0 || args.scales != 0, "scales", "an address", 0);
  }
}

}  // namespace ep::cuda
