// A receiving warp of combine, and the steps before and after it. combine_recv.cu and combine.cu are the kernels; their
// headers describe roles and memory order.
#pragma once
#include "cuda/core/copy.cuh"
#include "cuda/core/launch.cuh"
#include "cuda/moe/handle.cuh"
#include "cuda/moe/reduce.cuh"
#include "cuda/moe/signals.cuh"

namespace ep::cuda {

// The tokens whose partial rows one warp sums: a job of reduce_rows() (reduce.cuh).
class CombineRecvJob {
 public:
  struct Row {
    int32_t token;
    int32_t piece;
  };
  // `bases`: the slot where each rank's partial rows begin in this rank's pool; in shared memory. `parts`: the order in
  // which warps take tokens.
  __device__ CombineRecvJob(const Run& run, const CombineRecvArgs& args, const Cut& cut, const int32_t* bases,
                            const NextRow& parts)
      : run_(run),
        args_(args),
        cut_(cut),
        bases_(bases),
        slots_(args.comm.pool_bytes[kCombinePool] / partial_layout_of(args.header).bytes),
        parts_(parts) {}

  __device__ Next next(bool may_block, Row* row) {
    if (part_ == kNotRequested) part_ = parts_.next();
    if (part_ == kNoMore) return kEnd;
    const int32_t token = cut_.parts == 1 ? part_ : part_ / cut_.parts;
    if (token >= ready_end_) {
      const Chunks chunks = chunks_of(args_.routing.num_tokens);
      const int chunk = chunks.of(token);
      const Next found = chunk_ready(chunk, may_block);
      if (found == kEnd) part_ = kNoMore;
      if (found != kRow) return found;
      ready_end_ = chunks.end(chunk);
    }
    *row = Row{token, cut_.parts == 1 ? 0 : part_ % cut_.parts};
    part_ = kNotRequested;
    parts_.request();
    return kRow;
  }

  // One term for each rank to which the token went, in rank order.
  __device__ int list_terms(const Row& row, Term* terms) const {
    int count = 0;
    for (int base = 0; base < run_.comm.num_ranks; base += kWarp) {
      const int32_t slot = slot_of(row, base + lane_id());
      const unsigned mask = __ballot_sync(kAllLanes, slot >= 0);
      if (slot >= 0) terms[count + __popc(mask & ((1u << lane_id()) - 1u))] = Term{slot, 1.0f};
      count += __popc(mask);
    }
    return count;
  }

  __device__ const char* source(int32_t slot) const {
    return at<char>(peer::pool(run_.comm, kCombinePool, run_.comm.rank),
                    int64_t{slot} * static_cast<int32_t>(partial_layout_of(args_.header).bytes));
  }
  __device__ Bias bias(const Row& row) const {
    return bias_of(args_.bias, args_.wide_bias != 0, row.token, args_.hidden, args_.header.row_bytes);
  }
  __device__ char* target(const Row& row) const { return at<char>(args_.out, row.token * args_.header.row_bytes); }

  __device__ void set_factors(const Row&, Term*) const {}
  __device__ void prefetch(int, int) const {}
  __device__ void completed(uint32_t) const {}

  // Adds the extra values of the same ranks, in rank order.
  __device__ void finish(const Row& row) const {
    if (args_.extra == 0 || row.piece != 0) return;
    const int K = args_.routing.topk;
    const int64_t offset = partial_layout_of(args_.header).extra;
    for (int k = lane_id(); k - lane_id() < K; k += kWarp) {
      float sum = 0.0f;
      for (int base = 0; base < run_.comm.num_ranks; base += kWarp) {
        const int32_t slot = slot_of(row, base + lane_id());
        for (unsigned left = __ballot_sync(kAllLanes, slot >= 0); left != 0; left &= left - 1) {
          const char* partial = source(__shfl_sync(kAllLanes, slot, __ffs(left) - 1));
          if (k < K) sum += ptx::ld_coherent(reinterpret_cast<const float*>(partial + offset) + k);
        }
      }
      if (k < K) at<float>(args_.extra)[static_cast<int64_t>(row.token) * K + k] = sum;
    }
  }

 private:
  static constexpr int32_t kNotRequested = -1;

  // The slot of the token's partial row from a rank, or -1. If it lies outside the pool: -1, and the fault is recorded.
  __device__ int32_t slot_of(const Row& row, int rank) const {
    const int R = run_.comm.num_ranks;
    const int32_t position =
        rank < R ? at<const int32_t>(args_.routing.send_pos)[static_cast<int64_t>(row.token) * R + rank] : -1;
    if (position < 0) return -1;
    const int64_t slot = int64_t{bases_[rank]} + position;
    if (slot < slots_) return static_cast<int32_t>(slot);
    fail(run_.comm, kBadHandle, kCombineRecv, run_.comm.rank, row.token, slots_, slot);
    return -1;
  }

  // Returns whether the chunk has arrived from all ranks; kEnd after a fault.
  __device__ Next chunk_ready(int chunk, bool may_block) const {
    for (int base = 0; base < run_.comm.num_ranks; base += kWarp)
      if (const Next found = has_come_from(base + lane_id(), chunk, may_block); found != kRow) return found;
    __syncwarp();
    ptx::fence_proxy_async();
    return kRow;
  }

  // Each lane polls one rank. Returns whether the chunk has arrived from all of them.
  __device__ Next has_come_from(int rank, int chunk, bool may_block) const {
    const bool waits = rank < run_.comm.num_ranks;
    const Arrival* word = arrival(run_.comm, run_.comm.rank, kCombinePool, waits ? rank : 0, chunk);
    bool here = !waits, go_on = true;
    Deadline deadline;
    for (;;) {
      uint64_t seen = 0;
      if (!here) {
        int32_t begin, end;
        here = has_arrived(run_, word, &seen, &begin, &end);
        if (here) go_on = check(begin, end, rank, chunk);
      }
      if (__any_sync(kAllLanes, !go_on)) return kEnd;
      if (__all_sync(kAllLanes, here)) return kRow;
      if (!may_block) return kNotYet;
      if (!here) go_on = deadline.keep_waiting(run_, rank, chunk, run_.epoch, seen);
    }
  }

  // Whether the chunk has as many rows as this rank sent to `rank` in it.
  __device__ bool check(int32_t begin, int32_t end, int rank, int chunk) const {
    const int32_t* ends = meta_of(args_.comm, args_.routing).send_chunk_end + rank * kMaxChunks;
    const int32_t expected = chunk == 0 ? 0 : ends[chunk - 1];
    if (begin != expected) return fail(run_.comm, kBadData, kCombineRecv, rank, chunk, expected, begin);
    return end == ends[chunk] || fail(run_.comm, kBadData, kCombineRecv, rank, chunk, ends[chunk], end);
  }

  const Run& run_;
  const CombineRecvArgs& args_;
  const Cut& cut_;
  const int32_t* const bases_;
  const int64_t slots_;  // slots of the pool
  NextRow parts_;
  int32_t part_ = kNotRequested;  // the next to sum
  int32_t ready_end_ = 0;         // all tokens before this one have arrived, as far as this warp knows
};

__device__ __forceinline__ int64_t parts_to_receive(const CombineRecvArgs& args, const Cut& cut) {
  return int64_t{args.routing.num_tokens} * cut.parts;
}

// All threads call it. Returns whether the handle is sound and the partial rows of every rank end within this rank's
// pool. Writes `bases`, in shared memory: the slot where each rank's partial rows begin. Joins the CTA.
__device__ inline bool partials_fit(const Run& run, const CombineRecvArgs& args, int32_t* bases) {
  const Comm& comm = args.comm;
  const Meta meta = meta_of(comm, args.routing);
  bool ok = check_handle(run, sent_items(comm), [&](int item) { return sent_is_sound(args.routing, meta, item); });
  for (int rank = static_cast<int>(threadIdx.x); rank < comm.num_ranks; rank += static_cast<int>(blockDim.x)) {
    bases[rank] = meta.send_base[rank];
    const int64_t rows = static_cast<int64_t>(bases[rank]) + meta.rank_count[rank];
    const int64_t end = rows * partial_layout_of(args.header).bytes;
    if (end > comm.pool_bytes[kCombinePool])
      ok = fail(comm, kTooSmall, kCombineRecv, rank, 0, comm.pool_bytes[kCombinePool], end);
  }
  return __syncthreads_and(ok) != 0;
}

// All threads of the last CTA call it when all CTAs have finished.
__device__ inline void finish_combine_recv(const Run& run, const CombineRecvArgs& args) {
  if (__syncthreads_or(faulted(args.comm))) {
    const int64_t tokens = args.routing.num_tokens;
    fill_bytes(args.out, tokens * args.header.row_bytes, 0xFF, threadIdx.x, blockDim.x);
    fill_bytes(args.extra, tokens * args.routing.topk * 4, 0xFF, threadIdx.x, blockDim.x);
    return;
  }
  if (threadIdx.x == 0) state_of(run.comm).next_row[kCombineRecvRows] = 0;
  signal_consumed(run, kCombinePool);
  advance(run);
}

inline void require_combine_recv(const CombineRecvArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_header(args.header, args.routing);
  require_sms(args.num_sms);
  require_elements(args.header, args.hidden, args.element);
  require(args.extra == 0 || args.header.weight_bytes == 4, "weight_bytes", "4, because extra values return",
          args.header.weight_bytes);
  require_rows("out", args.out);
  require_rows("bias", args.bias);
}

}  // namespace ep::cuda
