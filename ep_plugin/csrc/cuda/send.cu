// Send: each row once to every rank that holds one of its experts, straight to its final slot, behind a head that says
// what it expands to. Chunk by chunk, so that receivers start before the last row has left.
//
// Roles. Warps take tokens as they come. Lane 0 loads the row into shared memory, all lanes write the head before it,
// and lane 0 stores both to each destination, one bulk store for each. The last warp of each CTA signals the chunks.
// Sends wait only on consumed words, never on rows. Memory order. The head is written by ordinary stores to shared
// memory: each lane fences the async proxy before lane 0 stores it. What peers may rely on is in signals.cuh. A slot:
// [ids[K] | rows[K] | weights[K] | scales | row], see SlotLayout.
//
// Quantised rows. All lanes make head, scales and row in a stage (quantize.cuh), fence and store as above. An image
// that is longer than any stage takes the plain path.
#include <type_traits>

#include "copy.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "quantize.cuh"
#include "signals.cuh"

namespace ep::cuda {

namespace {

// The chunks of this rank's tokens; a row's number is its token.
struct SentChunks {
  const Run& run;
  const Meta& meta;
  int num_tokens;

  __device__ int count() const { return num_chunks(num_tokens); }
  __device__ int32_t end(int chunk) const { return min((chunk + 1) * chunk_tokens(num_tokens), num_tokens); }
  __device__ void signal(int dest, int chunk) const {
    const int32_t* ends = meta.send_chunk_end + dest * kMaxChunks;
    signal_chunk(run, kDispatchPool, dest, chunk, chunk == 0 ? 0 : ends[chunk - 1], ends[chunk]);
  }
};

class SendJob {
 public:
  static constexpr bool kTells = true;
  static constexpr int kStages = 2;  // a row that is taken early is sent late, and its chunk with it

  __device__ SendJob(const Run& run, const SendArgs& args, const Meta& meta, const Cut& cut, Progress& progress)
      : args_(args),
        meta_(meta),
        cut_(cut),
        lay_(slot_layout_of(args.header)),
        lists_(list_of_warp(cut)),
        tokens_(run, kDispatchPool, args.routing.num_tokens, progress) {}

  __device__ Next next(bool) {
    token_ = tokens_.next();
    return token_ == kNoMore ? kEnd : kRow;
  }

  __device__ void load(Ring<kStages>& ring, int piece) {
    const int64_t begin = cut_.piece_begin(piece), skip = piece == 0 ? lay_.row : 0;
    char* stage = ring.stage(ring.issued);
    ring.load(row() + (begin + skip - lay_.row), cut_.piece_size(piece) - skip, skip);
    if (piece != 0) return;
    list_destinations(list_of(loaded_++));
    write_head(stage);
    ptx::fence_proxy_async_shared();
    __syncwarp();
  }

  __device__ void store(const char* stage, int piece) {
    if (lane_id() == 0) {
      const uint64_t* list = list_of(stored_);
      const uint32_t bytes = static_cast<uint32_t>(cut_.piece_size(piece));
      for (uint64_t d = 1; d <= list[0]; ++d)
        ptx::bulk_store(reinterpret_cast<char*>(list[d]) + cut_.piece_begin(piece), stage, bytes);
    }
    stored_ += piece + 1 == cut_.pieces;
  }

  __device__ void copy_plain() const {
    list_destinations(lists_);
    for (uint64_t d = 1; d <= lists_[0]; ++d) write_head(reinterpret_cast<char*>(lists_[d]));
    copy_row_plain(row(), lists_ + 1, static_cast<int>(lists_[0]), lay_.row, args_.header.row_bytes);
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
    for (uint64_t d = 1; d <= lists_[0]; ++d) write_head(reinterpret_cast<char*>(lists_[d]));
    quantized.write(lists_ + 1, static_cast<int>(lists_[0]), lay_);
    __syncwarp();
  }

  __device__ void completed(uint32_t rows) { tokens_.written(rows); }

  // A list: how many destinations the token has, then the addresses of its slots.
  static __host__ __device__ int list_size(int num_ranks) { return num_ranks + 1; }

 private:
  __device__ uint64_t* list_of(uint32_t row) const { return lists_ + row % kStages * list_size(args_.comm.num_ranks); }
  __device__ const char* row() const { return at<char>(args_.x, token_ * args_.x_stride); }

  __device__ void list_destinations(uint64_t* list) const {
    const int R = args_.comm.num_ranks, lane = lane_id();
    const int32_t* positions = at<const int32_t>(args_.routing.send_pos) + static_cast<int64_t>(token_) * R;
    const int32_t position = lane < R ? positions[lane] : -1;
    const unsigned mask = __ballot_sync(kAllLanes, position >= 0);
    if (lane == 0) list[0] = __popc(mask);
    if (position >= 0)
      list[1 + __popc(mask & ((1u << lane) - 1u))] =
          args_.comm.pool[kDispatchPool][lane] + (meta_.slot_base[lane] + static_cast<int64_t>(position)) * lay_.bytes;
    __syncwarp();
  }

  // The same for every destination: all pairs of the token.
  __device__ void write_head(char* to) const {
    const int K = args_.routing.topk;
    int32_t* ids = reinterpret_cast<int32_t*>(to);
    for (int k = lane_id(); k < K; k += kWarp) {
      const int64_t pair = static_cast<int64_t>(token_) * K + k;
      const int32_t id = at<const int32_t>(args_.routing.topk_ids)[pair];
      const int32_t position = at<const int32_t>(args_.routing.pair_pos)[pair];
      ids[k] = id;
      reinterpret_cast<int32_t*>(to + lay_.rows)[k] = id < 0 ? -1 : meta_.flat_base[id] + position;
      if (args_.header.weight_bytes != 0)
        reinterpret_cast<float*>(to + lay_.weights)[k] = at<const float>(args_.weights)[pair];
    }
    if (args_.scales != 0)
      copy_bytes(to + lay_.scales, at<char>(args_.scales, token_ * args_.scale_stride), args_.header.scale_bytes);
  }

  const SendArgs& args_;
  const Meta& meta_;
  const Cut& cut_;
  const SlotLayout lay_;
  uint64_t* const lists_;  // one for each row under way
  RowQueue tokens_;
  int32_t token_ = 0;
  uint32_t loaded_ = 0, stored_ = 0;  // rows
};

// All threads: this rank's rows end within every destination's pool.
__device__ bool rows_fit(const Run& run, const SendArgs& args, const Meta& meta) {
  const Comm& comm = args.comm;
  const int dest = static_cast<int>(threadIdx.x);
  bool ok = true;
  if (dest < comm.num_ranks && meta.rank_count[dest] > 0) {
    const int64_t end =
        (static_cast<int64_t>(meta.slot_base[dest]) + meta.rank_count[dest]) * slot_layout_of(args.header).bytes;
    if (end > comm.pool_bytes[kDispatchPool])
      ok = fail(comm, kTooSmall, kSend, dest, 0, comm.pool_bytes[kDispatchPool], end);
  }
  return __syncthreads_and(ok) != 0;
}

constexpr int kMostThreads = (kCopyWarps + 1) * kWarp;

// From: void, or the type of the elements that are quantised.
template <bool kBulk, class From>
__global__ void __launch_bounds__(kMostThreads, 1)
    send_kernel(const __grid_constant__ SendArgs args, const __grid_constant__ Cut cut) {
  __shared__ Progress progress;
  const Meta meta = meta_of(args.comm, args.routing);
  Run run = enter(args.comm, kSend);
  if (!run.ok) return;
  if (pools_must_grow(args, meta)) {
    if (args.optimistic == 0 && blockIdx.x == 0 && threadIdx.x == 0)
      fail(args.comm, kTooSmall, kSend, args.comm.rank, 0, args.comm.pool_bytes[kDispatchPool], *meta.max_slots);
    return;
  }
  progress.clear();
  tell_started(run, kDispatchPool);
  run.ok = rows_fit(run, args, meta) && open_destinations(run, kDispatchPool, args.header);
  if (run.ok) {
    if (args.routing.num_tokens == 0 && blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(run);
    if (warp_id() == cut.warps) {
      signal_chunks(run, kDispatchPool, progress, cut.warps, SentChunks{run, meta, args.routing.num_tokens});
    } else {
      SendJob job(run, args, meta, cut, progress);
      if constexpr (std::is_void_v<From>)
        copy_rows<kBulk>(job, run, cut);
      else
        make_rows<kBulk, From>(job, cut);
    }
  }
  if (last_to_finish(run) && !faulted(args.comm)) finish_sending(run, kDispatchPool);
}

template <bool kBulk, class From>
void launch_send(const SendArgs& args, const Cut& cut) {
  launch<send_kernel<kBulk, From>>("send", args.num_sms, (cut.warps + 1) * kWarp, cut.shared_bytes(), args.stream, args,
                                   cut);
}

// A quantised row must fit whole in a stage, and few warps with stages are better than none.
template <class From>
void send_rows(const SendArgs& args) {
  const Room room = room_for<send_kernel<true, From>>();
  const int list = SendJob::list_size(args.comm.num_ranks), least = std::is_void_v<From> ? kLeastCopyWarps : 1;
  const SlotLayout lay = slot_layout_of(args.header);
  constexpr int kStages = SendJob::kStages;
  const Cut cut = cut_for_warps(lay.image, least, kCopyWarps, kStages, kStages * list, room.shared_bytes);
  const bool fits = std::is_void_v<From> ? lay.row < cut.piece_bytes : cut.pieces == 1;
  if (room.bulk && args.comm.plain == 0 && fits)
    launch_send<true, From>(args, cut);
  else
    launch_send<false, From>(args, uncut(lay.image, kCopyWarps, list));
}

}  // namespace

void send(const SendArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_header(args.header, args.routing);
  require_sms(args.num_sms);
  require_rows("x", args.x, args.routing.num_tokens > 1 ? args.x_stride : 0);
  if (args.routing.num_tokens > 0) {
    require(args.header.weight_bytes == 0 || args.weights != 0, "weights", "an address", 0);
    require(args.header.scale_bytes == 0 || args.quantize != 0 || args.scales != 0, "scales", "an address", 0);
  }
  if (args.quantize == 0) return send_rows<void>(args);
  require_quantizable(args.header, args.element);
  if (args.element == kBFloat16) return send_rows<FromBFloat16>(args);
  if (args.element == kFloat16) return send_rows<FromFloat16>(args);
  return send_rows<FromFloat32>(args);
}

}  // namespace ep::cuda
