// A sending warp of dispatch, and the checks before it sends. dispatch_send.cu and dispatch.cu are the kernels; their
// headers describe roles and memory order.
#pragma once
#include <type_traits>

#include "cuda/core/copy.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/core/quantize.cuh"
#include "cuda/moe/handle.cuh"
#include "cuda/moe/signals.cuh"

namespace ep::cuda {

// This rank's rows for itself go through its pool, like all other rows.
struct ThroughPool {
  static constexpr bool kDirect = false;
};

// The chunks of this rank's tokens, for signal_chunks(). A row's number is its token. The warp that makes the object
// waits until notify has the counts.
struct SentChunks {
  const Run& run;
  const DispatchSendArgs& args;
  const Meta& meta;
  const Chunks chunks;
  const int parts;  // parts of a row
  const bool counts_known;

  __device__ SentChunks(const Run& run, const DispatchSendArgs& args, const Meta& meta, int parts)
      : run(run),
        args(args),
        meta(meta),
        chunks(chunks_of(args.routing.num_tokens)),
        parts(parts),
        counts_known(has_counts(run, args.header)) {}

  // False if pools must grow.
  __device__ bool may_signal() const { return counts_known && !pools_must_grow(run.comm, args.header, meta); }

  __device__ int count() const { return chunks.count; }
  __device__ int32_t end(int chunk) const { return chunks.end(chunk) * parts; }
  __device__ void signal(int dest, int chunk) const {
    const int32_t* ends = meta.send_chunk_end + dest * kMaxChunks;
    signal_chunk(run, kDispatchPool, dest, chunk, chunk == 0 ? 0 : ends[chunk - 1], ends[chunk]);
  }
};

// The rows that one warp sends: a job of copy_rows() (copy.cuh) or make_rows() (quantize.cuh).
// `Own` handles this rank's rows for itself on the bulk path. It is ThroughPool, or RowWriter (dispatch_recv.cuh).
// RowWriter stores them to their output rows, from the same stage as the slots of peers.
template <class Own>
class DispatchSendJob {
 public:
  static constexpr bool kSignals = true;
  static constexpr int kStages = 2;  // more would delay rows, and with each row its chunk

  __device__ DispatchSendJob(const Run& run, const DispatchSendArgs& args, const Meta& meta, const Cut& cut,
                             Progress& progress, Own own = Own{})
      : args_(args),
        meta_(meta),
        cut_(cut),
        lay_(slot_layout_of(args.header)),
        region_(region_slots_of(args.comm, args.header)),
        first_slot_(args.comm.rank * region_),
        lists_(list_of_warp(cut)),
        tokens_(NextRow(run, kDispatchSendRows, args.routing.num_tokens * cut.parts, cut.first_warp, cut.warps),
                progress),
        own_(own) {}

  __device__ Next next(bool) {
    const int32_t found = tokens_.next();
    if (found == kNoMore) return kEnd;
    token_ = cut_.parts == 1 ? found : found / cut_.parts;
    part_ = cut_.parts == 1 ? 0 : found % cut_.parts;
    return kRow;
  }

  __device__ void load(Ring<kStages>& ring, int unit) {
    const int piece = part_ + unit;
    const int64_t begin = cut_.piece_begin(piece), skip = piece == 0 ? lay_.row : 0;
    char* stage = ring.stage(ring.issued);
    ring.load(row() + (begin + skip - lay_.row), cut_.piece_size(piece) - skip, skip);
    if (unit == 0) list_destinations(list_of(loaded_++));
    if (piece != 0) return;
    write_head(stage);
    ptx::fence_proxy_async_shared();
    __syncwarp();
  }

  __device__ void store(const char* stage, int unit) {
    const uint64_t* list = list_of(stored_);
    const int piece = static_cast<int>(list[0] >> 32) + unit;
    if (lane_id() == 0) {
      const int64_t begin = cut_.piece_begin(piece), skip = piece == 0 ? lay_.ids : 0;
      const uint32_t bytes = static_cast<uint32_t>(cut_.piece_size(piece) - skip);
      for (int d = 1; d <= num_listed(list); ++d)
        peer::store_bulk(reinterpret_cast<char*>(list[d]) + (begin + skip), stage + skip, bytes);
    }
    if constexpr (Own::kDirect) {
      const int32_t position = static_cast<int32_t>(list[list_size(args_.comm.num_ranks) - 1]);
      if (position >= 0) own_.store(args_.comm.rank, position, stage, stage, piece, unit, cut_);
    }
    stored_ += unit + 1 == cut_.units();
  }

  __device__ void copy_plain() const {
    list_destinations(lists_);
    for (int d = 1; d <= num_listed(lists_); ++d) write_head(reinterpret_cast<char*>(lists_[d]));
    copy_row_plain(row(), lists_ + 1, num_listed(lists_), lay_.row, args_.header.row_bytes);
    __syncwarp();
  }

  template <class From>
  __device__ void make(char* stage) {
    QuantizedRow<From> quantized(row(), args_.header.row_bytes);
    list_destinations(list_of(loaded_++));
    write_head(stage);
    const uint64_t image = reinterpret_cast<uint64_t>(stage);
    quantized.write(&image, 1, lay_);
    ptx::fence_proxy_async_shared();
    __syncwarp();
  }

  template <class From>
  __device__ void make_plain() const {
    QuantizedRow<From> quantized(row(), args_.header.row_bytes);
    list_destinations(lists_);
    for (int d = 1; d <= num_listed(lists_); ++d) write_head(reinterpret_cast<char*>(lists_[d]));
    quantized.write(lists_ + 1, num_listed(lists_), lay_);
    __syncwarp();
  }

  __device__ void completed(uint32_t rows) { tokens_.written(rows); }

  // Words of a list of destinations. The first word is the number of destinations and, in its upper half, the part of
  // the row. Then come the addresses of the slots. With Own::kDirect, the last word is the row's position among this
  // rank's rows for itself, or -1.
  static __host__ __device__ int list_size(int num_ranks) { return num_ranks + 1 + Own::kDirect; }

 private:
  __device__ uint64_t* list_of(uint32_t row) const { return lists_ + row % kStages * list_size(args_.comm.num_ranks); }
  static __device__ int num_listed(const uint64_t* list) { return static_cast<int>(static_cast<uint32_t>(list[0])); }
  __device__ const char* row() const { return at<char>(args_.x, token_ * args_.x_stride); }

  __device__ void list_destinations(uint64_t* list) const {
    const int R = args_.comm.num_ranks, lane = lane_id();
    const int32_t* positions = at<const int32_t>(args_.routing.send_pos) + static_cast<int64_t>(token_) * R;
    int listed = 0;
    for (int base = 0; base < R; base += kWarp) {
      const int rank = base + lane;
      int32_t position = rank < R ? positions[rank] : -1;
      const Address pool = rank < R ? address_in(args_.comm.pool[kDispatchPool], rank) : 0;
      if (position >= region_) {
        fail(args_.comm, kBadHandle, kDispatchSend, args_.comm.rank, token_, region_, position);
        position = -1;
      }
      if (Own::kDirect && rank == args_.comm.rank) {
        list[list_size(R) - 1] = static_cast<uint64_t>(position);
        position = -1;
      }
      const unsigned mask = __ballot_sync(kAllLanes, position >= 0);
      if (position >= 0)
        list[1 + listed + __popc(mask & ((1u << lane) - 1u))] =
            pool + static_cast<int64_t>(first_slot_ + position) * lay_.bytes;
      listed += __popc(mask);
    }
    if (lane == 0) list[0] = static_cast<uint64_t>(part_) << 32 | static_cast<uint32_t>(listed);
    __syncwarp();
  }

  // All lanes: writes the head of the slot, which is the same for every destination. It has all pairs of the token.
  __device__ void write_head(char* to) const {
    const int K = args_.routing.topk;
    int32_t* ids = reinterpret_cast<int32_t*>(to + lay_.ids);
    for (int k = lane_id(); k < K; k += kWarp) {
      const int64_t pair = static_cast<int64_t>(token_) * K + k;
      const int32_t id = at<const int32_t>(args_.routing.topk_ids)[pair];
      const int32_t position = at<const int32_t>(args_.routing.pair_pos)[pair];
      ids[k] = id;
      reinterpret_cast<int32_t*>(to + lay_.positions)[k] = position;
      if (args_.header.weight_bytes != 0)
        reinterpret_cast<float*>(to + lay_.weights)[k] = at<const float>(args_.weights)[pair];
    }
    if (args_.scales != 0)
      copy_bytes(to + lay_.scales, at<char>(args_.scales, token_ * args_.scale_stride), args_.header.scale_bytes);
  }

  const DispatchSendArgs& args_;
  const Meta& meta_;
  const Cut& cut_;
  const SlotLayout lay_;
  const int32_t region_;      // slots of this rank's region, in any pool
  const int32_t first_slot_;  // first slot of that region
  uint64_t* const lists_;     // a list of destinations for each row in flight
  RowQueue tokens_;
  int32_t token_ = 0, part_ = 0;
  uint32_t loaded_ = 0, stored_ = 0;  // rows
  Own own_;
};

// All threads call it, and share the destinations. Returns whether a reused handle is sound. Also checks that this
// rank's rows fit in its region at every destination. If they do not, an optimistic send exits, and any other send
// records a fault.
__device__ inline bool sends_fit(const Run& run, const DispatchSendArgs& args, const Meta& meta) {
  if (args.header.op == kOpCachedDispatch &&
      !check_handle(run, sent_items(run.comm), [&](int item) { return sent_is_sound(args.routing, meta, item); }))
    return false;
  const int last = num_chunks(args.routing.num_tokens) - 1;
  const int64_t room = region_slots_of(args.comm, args.header);
  for (int dest = static_cast<int>(threadIdx.x); dest < args.comm.num_ranks; dest += static_cast<int>(blockDim.x)) {
    const int64_t rows = last < 0 ? 0 : meta.send_chunk_end[dest * kMaxChunks + last];
    if (rows > room) return args.optimistic == 0 && fail(args.comm, kTooSmall, kDispatchSend, dest, 0, room, rows);
  }
  return true;
}

// One warp sends its rows. From: the element type of rows that are quantised, or void for rows that are sent as they
// are.
template <bool kBulk, class From, class Job>
__device__ __forceinline__ void send_rows(Job& job, const Run& run, const Cut& cut) {
  if constexpr (std::is_void_v<From>)
    copy_rows<kBulk>(job, run, cut);
  else
    make_rows<kBulk, From>(job, cut);
}

// Whether rows can be moved in bulk with this cut. A quantised row must fit in one stage. One warp with such a stage is
// enough.
template <class From>
constexpr int kMinSendWarps = std::is_void_v<From> ? kMinCopyWarps : 1;
template <class From>
bool sends_in_bulk(const SlotLayout& lay, const Cut& cut) {
  return std::is_void_v<From> ? lay.row < cut.piece_bytes : cut.pieces == 1;
}

inline void require_dispatch_send(const DispatchSendArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_header(args.header, args.routing);
  require_sms(args.num_sms);
  require_rows("x", args.x, args.routing.num_tokens > 1 ? args.x_stride : 0);
  if (args.routing.num_tokens > 0) {
    require(args.header.weight_bytes == 0 || args.weights != 0, "weights", "an address", 0);
    require(args.header.scale_bytes == 0 || args.quantize != 0 || args.scales != 0, "scales", "an address", 0);
  }
  if (args.quantize != 0) require_quantizable(args.header, args.element);
}

}  // namespace ep::cuda
