// What a warp of add does with this rank's tokens, and what the kernels that add do before and after. Roles and memory
// order are in add.cu.
#pragma once
#include "copy.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "signals.cuh"

namespace ep::cuda {

class AddJob {
 public:
  struct Row {
    int32_t token;
    int32_t piece;
  };
  __device__ AddJob(const Run& run, const AddArgs& args, const Cut& cut)
      : run_(run),
        args_(args),
        meta_(meta_of(args.comm, args.routing)),
        lay_(partial_layout_of(args.header)),
        chunks_(chunks_of(args.routing.num_tokens)),
        parts_(cut.parts),
        team_(team_of_warps(cut.first_warp, cut.warps)),
        part_(static_cast<uint32_t>(team_.index)) {}

  __device__ Next next(bool may_block, Row* row) {
    const uint32_t token = parts_ == 1 ? part_ : part_ / parts_;
    if (token >= static_cast<uint32_t>(chunks_.num_tokens)) return kEnd;
    const int chunk = chunks_.of(static_cast<int>(token));
    if (chunk != ready_chunk_) {
      const Next found = chunk_ready(chunk, may_block);
      if (found == kEnd) part_ = UINT32_MAX;
      if (found != kRow) return found;
      ready_chunk_ = chunk;
    }
    *row = Row{static_cast<int32_t>(token), parts_ == 1 ? 0 : static_cast<int32_t>(part_ % parts_)};
    part_ += static_cast<uint32_t>(team_.size);
    return kRow;
  }

  // A term for each rank that the token went to, in their order.
  __device__ int describe(const Row& row, Term* terms) const {
    const int lane = lane_id();
    const int32_t slot = lane < run_.comm.num_ranks ? slot_from(row.token, lane) : -1;
    const unsigned mask = __ballot_sync(kAllLanes, slot >= 0);
    if (slot >= 0) terms[__popc(mask & ((1u << lane) - 1u))] = Term{slot, 1.0f};
    return __popc(mask);
  }

  __device__ const char* source(int32_t slot) const {
    return at<char>(run_.comm.pool[kCombinePool][run_.comm.rank], slot * lay_.bytes);
  }
  __device__ const char* bias(const Row& row) const {
    return args_.bias == 0 ? nullptr : at<char>(args_.bias, row.token * args_.header.row_bytes);
  }
  __device__ char* target(const Row& row) const { return at<char>(args_.out, row.token * args_.header.row_bytes); }

  __device__ void settle(const Row&, Term*) const {}
  __device__ void ahead(int, int) const {}
  __device__ void completed(uint32_t) const {}

  // What rode back with each pair, from the rank that holds its expert.
  __device__ void finish(const Row& row) const {
    if (args_.extra == 0 || row.piece != 0) return;
    const int K = args_.routing.topk, per_rank = local_experts(run_.comm);
    for (int k = lane_id(); k < K; k += kWarp) {
      const int64_t pair = static_cast<int64_t>(row.token) * K + k;
      const int32_t id = at<const int32_t>(args_.routing.topk_ids)[pair];
      const int32_t slot = id < 0 ? -1 : slot_from(row.token, id / per_rank);
      at<float>(args_.extra)[pair] =
          slot < 0 ? 0.0f : ptx::ld_coherent(reinterpret_cast<const float*>(source(slot) + lay_.extra) + k);
    }
  }

 private:
  // Where the token's partial row from `rank` lies in this rank's pool, or -1.
  __device__ int32_t slot_from(int32_t token, int rank) const {
    const int32_t position =
        at<const int32_t>(args_.routing.send_pos)[static_cast<int64_t>(token) * run_.comm.num_ranks + rank];
    return position < 0 ? -1 : meta_.send_base[rank] + position;
  }

  // A lane for each rank. kEnd: a fault.
  __device__ Next chunk_ready(int chunk, bool may_block) const {
    const int rank = lane_id();
    const bool waits = rank < run_.comm.num_ranks;
    const Arrival* word = arrival(run_.comm, run_.comm.rank, kCombinePool, waits ? rank : 0, chunk);
    bool here = !waits, go_on = true;
    Patience patience;
    for (;;) {
      uint64_t seen = 0;
      if (!here) {
        int32_t begin, end;
        here = has_arrived(run_, word, &seen, &begin, &end);
        if (here) go_on = check(begin, end, rank, chunk);
      }
      if (__any_sync(kAllLanes, !go_on)) return kEnd;
      if (__all_sync(kAllLanes, here)) break;
      if (!may_block) return kNotYet;
      if (!here) go_on = patience.keep_waiting(run_, rank, chunk, run_.epoch, seen);
    }
    __syncwarp();
    ptx::fence_proxy_async();
    return kRow;
  }

  // The chunk's rows are those that this rank sent there.
  __device__ bool check(int32_t begin, int32_t end, int rank, int chunk) const {
    const int32_t* ends = meta_.send_chunk_end + rank * kMaxChunks;
    const int32_t expected = chunk == 0 ? 0 : ends[chunk - 1];
    if (begin != expected) return fail(run_.comm, kBadData, kAdd, rank, chunk, expected, begin);
    return end == ends[chunk] || fail(run_.comm, kBadData, kAdd, rank, chunk, ends[chunk], end);
  }

  const Run& run_;
  const AddArgs& args_;
  const Meta meta_;
  const PartialLayout lay_;
  const Chunks chunks_;
  const uint32_t parts_;  // of a row
  const Team team_;
  uint32_t part_;  // the next to take
  int ready_chunk_ = -1;
};

// All threads: the partial rows of every rank end within this rank's pool.
__device__ inline bool partials_fit(const Run& run, const AddArgs& args) {
  const Comm& comm = args.comm;
  const Meta meta = meta_of(comm, args.routing);
  const int rank = static_cast<int>(threadIdx.x);
  bool ok = true;
  if (rank < comm.num_ranks) {
    const int64_t rows = static_cast<int64_t>(meta.send_base[rank]) + meta.rank_count[rank];
    const int64_t end = rows * partial_layout_of(args.header).bytes;
    if (end > comm.pool_bytes[kCombinePool])
      ok = fail(comm, kTooSmall, kAdd, rank, 0, comm.pool_bytes[kCombinePool], end);
  }
  return __syncthreads_and(ok) != 0;
}

// The last CTA's end, all threads.
__device__ inline void finish_adding(const Run& run, const AddArgs& args) {
  if (__syncthreads_or(faulted(args.comm))) {
    const int64_t tokens = args.routing.num_tokens;
    fill_bytes(args.out, tokens * args.header.row_bytes, 0xFF, threadIdx.x, blockDim.x);
    fill_bytes(args.extra, tokens * args.routing.topk * 4, 0xFF, threadIdx.x, blockDim.x);
    return;
  }
  tell_consumed(run, kCombinePool, static_cast<int>(threadIdx.x));
  advance(run);
}

inline void require_add(const AddArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_header(args.header, args.routing);
  require_sms(args.num_sms);
  require_elements(args.header, args.hidden, args.element);
  require(args.extra == 0 || args.header.weight_bytes == 4, "weight_bytes", "4, as extra values ride back",
          args.header.weight_bytes);
  require_rows("out", args.out);
  require_rows("bias", args.bias);
}

}  // namespace ep::cuda
