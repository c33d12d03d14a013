// Send: each row once to every rank that holds one of its experts, straight to its final slot, with a record of what it
// expands to. Chunk by chunk, so that receivers start before the last row has left.
//
// Roles. Warps take tokens in turn. Lane 0 moves the row (bulk: one load, one store per destination); all lanes write
// the record and scales beside it with ordinary stores. Sends wait only on consumed words, never on rows.
// Memory order. When a warp's rows of a chunk are written, it fences once at system scope and counts itself in; the
// last warp of the chunk stores every destination's arrival, flag last, with release at system scope.
// A slot: [row | scales | weights[K] | rows[K] | ids[K]], see SlotLayout.
#include "copy.cuh"
#include "kernels.h"
#include "launch.cuh"

namespace ep::cuda {

namespace {

class SendJob {
 public:
  __device__ SendJob(const Run& run, const SendArgs& args, uint32_t units_per_row)
      : run_(run),
        args_(args),
        meta_(meta_of(args.comm, args.routing)),
        lay_(slot_layout_of(args.header)),
        team_(team_of_warps()),
        units_per_row_(units_per_row),
        next_(team_.index) {
    boundary_ = units_through(0);
  }

  __device__ Next next(bool, int32_t* token) {
    if (next_ >= args_.routing.num_tokens) return kEnd;
    *token = static_cast<int32_t>(next_);
    next_ += team_.size;
    return kRow;
  }

  __device__ const char* source(int32_t token) const { return at<char>(args_.x, token * args_.x_stride); }

  __device__ int place(int32_t token, uint64_t* dests) const {
    const int R = args_.comm.num_ranks, lane = lane_id();
    const int32_t* positions = at<const int32_t>(args_.routing.send_pos) + static_cast<int64_t>(token) * R;
    int32_t slot = -1;
    if (lane < R && positions[lane] >= 0) slot = meta_.slot_base[lane] + positions[lane];
    const unsigned mask = __ballot_sync(kAllLanes, slot >= 0);
    __syncwarp();
    if (slot >= 0) dests[__popc(mask & ((1u << lane) - 1u))] = args_.comm.pool[kDispatchPool][lane] + slot * lay_.bytes;
    __syncwarp();
    write_records(token, mask, slot);
    if (args_.header.scale_bytes != 0)
      for (int d = 0; d < __popc(mask); ++d)
        copy_bytes(at<char>(dests[d], lay_.scales), at<char>(args_.scales, token * args_.scale_stride),
                   args_.header.scale_bytes);
    return __popc(mask);
  }

  // Signals the chunks of which this warp has now written all its rows.
  __device__ void completed(uint32_t units) {
    const int chunks = num_chunks(args_.routing.num_tokens);
    while (chunk_ < chunks && boundary_ <= units) {
      const bool took_part = chunk_ == 0 ? boundary_ > 0 : boundary_ > units_through(chunk_ - 1);
      if (took_part) signal(chunk_);
      boundary_ = units_through(++chunk_);
    }
  }

 private:
  // Units of this warp in tokens up to the end of a chunk.
  __device__ int64_t units_through(int chunk) const {
    const int T = args_.routing.num_tokens;
    const int64_t end = min(static_cast<int64_t>(chunk + 1) * chunk_tokens(T), static_cast<int64_t>(T));
    return end <= team_.index ? 0 : ((end - team_.index - 1) / team_.size + 1) * units_per_row_;
  }

  // A lane for each pair; each destination's record names the pairs that live there.
  __device__ void write_records(int32_t token, unsigned mask, int32_t slot) const {
    const int K = args_.routing.topk, per_rank = local_experts(args_.comm);
    const bool flat = args_.routing.layout == kFlat, weighted = args_.header.weight_bytes != 0;
    for (int k = lane_id(); k - lane_id() < K; k += kWarp) {
      const int64_t pair = static_cast<int64_t>(token) * K + k;
      const int32_t id = k < K ? at<const int32_t>(args_.routing.topk_ids)[pair] : -1;
      const int32_t row = flat && id >= 0 ? meta_.flat_base[id] + at<const int32_t>(args_.routing.pair_pos)[pair] : -1;
      const float weight = weighted && k < K ? at<const float>(args_.weights)[pair] : 0.0f;
      for (unsigned left = mask; left != 0; left &= left - 1) {
        const int dest = __ffs(left) - 1;
        const int32_t index = __shfl_sync(kAllLanes, slot, dest);
        const Address record = args_.comm.pool[kDispatchPool][dest] + index * lay_.bytes;
        const int32_t local = id - dest * per_rank;
        const bool here = id >= 0 && local >= 0 && local < per_rank;
        if (k >= K) continue;
        if (weighted) at<float>(record, lay_.weights)[k] = here ? weight : 0.0f;
        at<int32_t>(record, lay_.rows)[k] = !here ? -1 : flat ? row : index;
        at<int32_t>(record, lay_.ids)[k] = here ? local : -1;
      }
    }
  }

  __device__ void signal(int chunk) const {
    const Comm& comm = args_.comm;
    const int T = args_.routing.num_tokens, size = chunk_tokens(T);
    const int64_t tokens = min(size, T - chunk * size);
    uint32_t* counter = &state_of(comm).chunk_done[kDispatchPool][0][chunk];
    if (!count_in(counter, min(tokens, team_.size)) || faulted(comm)) return;
    const int dest = lane_id();
    if (dest < comm.num_ranks) {
      const int32_t* ends = meta_.send_chunk_end + dest * kMaxChunks;
      signal_chunk(run_, kDispatchPool, dest, chunk, chunk == 0 ? 0 : ends[chunk - 1], ends[chunk]);
    }
    __syncwarp();
    if (chunk == 0 && lane_id() == 0) hold_at_gate(run_);
    __syncwarp();
  }

  const Run& run_;
  const SendArgs& args_;
  const Meta meta_;
  const SlotLayout lay_;
  const Team team_;
  const uint32_t units_per_row_;
  int64_t next_;          // token
  int64_t boundary_ = 0;  // units of this warp through chunk_
  int chunk_ = 0;         // the first that is not signalled
};

// All threads: this rank's rows end within every destination's pool.
__device__ bool rows_fit(const Run& run, const SendArgs& args) {
  const Comm& comm = args.comm;
  const Meta meta = meta_of(comm, args.routing);
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

template <bool kBulk>
__global__ void __launch_bounds__(kCopyThreads, 1)
    send_kernel(const __grid_constant__ SendArgs args, const __grid_constant__ Cut cut) {
  Run run = enter(args.comm, kSend);
  if (run.ok) {
    tell_started(run, kDispatchPool);
    run.ok = rows_fit(run, args) && open_destinations(run, kDispatchPool, args.header);
  }
  if (run.ok) {
    if (args.routing.num_tokens == 0 && blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(run);
    SendJob job(run, args, kBulk ? cut.pieces : 1);
    copy_rows<kBulk>(job, run, cut);
  }
  if (last_to_finish(run) && !faulted(args.comm)) advance(run);
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
    require(args.header.scale_bytes == 0 || args.scales != 0, "scales", "an address", 0);
  }
  const Room room = room_for<send_kernel<true>>();
  const bool bulk = room.bulk && args.comm.plain == 0;
  const int64_t largest = std::min<int64_t>(args.header.row_bytes, kLargestPiece);
  const Cut cut = make_cut(args.header.row_bytes, largest, kCopyWarps, args.comm.num_ranks, room.shared_bytes, bulk);
  const int64_t shared = shared_bytes_of(cut, kCopyWarps);
  if (bulk)
    launch<send_kernel<true>>("send", args.num_sms, kCopyThreads, shared, args.stream, args, cut);
  else
    launch<send_kernel<false>>("send", args.num_sms, kCopyThreads, shared, args.stream, args, cut);
}

}  // namespace ep::cuda
