// Push: a received slot's expert rows -> one partial row, stored in the combine pool of the token's owner.
//
// Roles. Warps take slots in turn, chunk by chunk of the owners' tokens and all owners in turn, beginning with the next
// rank so that no two ranks write to one owner in step. Expert rows come through shared memory (bulk) or registers;
// the sum is stored at the owner straight from registers, with the values that ride back beside it.
// Pushes wait only on consumed words, never on rows.
// Memory order. When a warp's rows of a chunk are stored, it fences once at system scope and counts itself in; the
// last warp stores the owner's arrival, flag last, with release at system scope.
// A slot of the combine pool: [row | extra[K]], see PartialLayout.
#include "kernels.h"
#include "launch.cuh"
#include "reduce.cuh"

namespace ep::cuda {

namespace {

// What every warp looks up for each chunk.
struct Chunks {
  int32_t end[kMaxRanks][kMaxChunks];  // of the rows, by source
  int32_t count[kMaxRanks];
};

class PushJob {
 public:
  struct Row {
    int32_t slot;
    int32_t owner, chunk;
    int32_t begin, end;  // the chunk's slots
  };

  __device__ PushJob(const Run& run, const PushArgs& args, const Chunks& chunks)
      : run_(run),
        args_(args),
        meta_(meta_of(args.comm, args.routing)),
        lay_(partial_layout_of(args.header)),
        chunks_(chunks),
        team_(team_of_warps()),
        flat_(args.routing.layout == kFlat) {}

  __device__ Next next(bool, Row* row) {
    const int R = run_.comm.num_ranks;
    while (slot_ >= end_) {
      if (item_ == R * kMaxChunks) return kEnd;
      chunk_ = item_ / R;
      owner_ = (run_.comm.rank + 1 + item_ % R) % R;
      ++item_;
      if (chunk_ >= chunks_.count[owner_]) continue;
      const int32_t first = meta_.recv_offset[owner_];
      begin_ = first + (chunk_ == 0 ? 0 : chunks_.end[owner_][chunk_ - 1]);
      end_ = first + chunks_.end[owner_][chunk_];
      slot_ = first_of(team_, begin_);
    }
    *row = Row{static_cast<int32_t>(slot_), owner_, chunk_, begin_, end_};
    slot_ += team_.size;
    return kRow;
  }

  __device__ int describe(const Row& row, Term* terms) const {
    return flat_ ? describe_flat(row, terms) : describe_token(row, terms);
  }

  __device__ const char* source(int32_t term_row) const { return at<char>(args_.y, term_row * args_.header.row_bytes); }
  __device__ const char* bias(const Row&) const { return nullptr; }
  __device__ char* target(const Row& row) const {
    const int64_t index = static_cast<int64_t>(meta_.push_base[row.owner]) + row.slot - meta_.recv_offset[row.owner];
    return at<char>(args_.comm.pool[kCombinePool][row.owner], index * lay_.bytes);
  }

  __device__ void finish(const Row& row) const {
    if (args_.header.weight_bytes != 0) write_extra(row);
    if (row.slot + team_.size < row.end) return;
    const Comm& comm = run_.comm;
    uint32_t* counter = &state_of(comm).chunk_done[kCombinePool][row.owner][row.chunk];
    if (!count_in(counter, min(static_cast<int64_t>(row.end) - row.begin, team_.size)) || faulted(comm)) return;
    if (lane_id() == 0) {
      const int32_t first = meta_.recv_offset[row.owner];
      signal_chunk(run_, kCombinePool, row.owner, row.chunk, row.begin - first, row.end - first);
      if (row.chunk == 0) hold_at_gate(run_);
    }
    __syncwarp();
  }

 private:
  __device__ int32_t recv_row(const Row& row, int k) const {
    return at<const int32_t>(args_.routing.recv_rows)[static_cast<int64_t>(row.slot) * args_.routing.topk + k];
  }

  __device__ bool sound(const Row& row, int k, int32_t from) const {
    return from < args_.rows || fail(run_.comm, kBadData, kCombine, run_.comm.rank, k, args_.rows, from);
  }

  // A term for each pair that came here.
  __device__ int describe_flat(const Row& row, Term* terms) const {
    const int K = args_.routing.topk;
    int count = 0;
    for (int k = lane_id(); k - lane_id() < K; k += kWarp) {
      const int32_t from = k < K ? recv_row(row, k) : -1;
      const bool here = from >= 0 && sound(row, k, from);
      const float factor = here && args_.weights != 0 ? at<const float>(args_.weights)[from] : 1.0f;
      const unsigned mask = __ballot_sync(kAllLanes, here);
      if (here) terms[count + __popc(mask & ((1u << lane_id()) - 1u))] = Term{from, factor};
      count += __popc(mask);
    }
    return count;
  }

  // One term, whose factor is the sum of the weights of the pairs that came here, in their order.
  __device__ int describe_token(const Row& row, Term* terms) const {
    const int K = args_.routing.topk;
    const bool weighted = args_.weights != 0;
    bool any = false;
    float factor = weighted ? 0.0f : 1.0f;
    for (int k = lane_id(); k - lane_id() < K; k += kWarp) {
      const int32_t from = k < K ? recv_row(row, k) : -1;
      const bool here = from >= 0 && sound(row, k, from);
      const int64_t pair = static_cast<int64_t>(row.slot) * K + k;
      const float weight = here && weighted ? at<const float>(args_.weights)[pair] : 0.0f;
      const unsigned mask = __ballot_sync(kAllLanes, here);
      any |= mask != 0;
      for (unsigned left = weighted ? mask : 0; left != 0; left &= left - 1)
        factor += __shfl_sync(kAllLanes, weight, __ffs(left) - 1);
    }
    if (any && lane_id() == 0) terms[0] = Term{row.slot, factor};
    return any ? 1 : 0;
  }

  __device__ void write_extra(const Row& row) const {
    const int K = args_.routing.topk;
    float* to = reinterpret_cast<float*>(target(row) + lay_.extra);
    for (int k = lane_id(); k < K; k += kWarp) {
      const int32_t from = recv_row(row, k);
      const int64_t index = flat_ ? from : static_cast<int64_t>(row.slot) * K + k;
      to[k] = from < 0 || from >= args_.rows ? 0.0f : at<const float>(args_.extra)[index];
    }
  }

  const Run& run_;
  const PushArgs& args_;
  const Meta meta_;
  const PartialLayout lay_;
  const Chunks& chunks_;
  const Team team_;
  const bool flat_;
  int item_ = 0;  // the next chunk, of all owners
  int owner_ = 0, chunk_ = 0;
  int32_t begin_ = 0, end_ = 0;
  int64_t slot_ = 0;  // the next of the chunk before item_
};

// All threads: the rows that this rank holds of every source end within the pools and lists they belong to.
__device__ bool rows_fit(const Run& run, const PushArgs& args) {
  const Comm& comm = args.comm;
  const Meta meta = meta_of(comm, args.routing);
  const int owner = static_cast<int>(threadIdx.x);
  bool ok = true;
  if (owner < comm.num_ranks) {
    const int64_t rows = meta.recv_offset[owner + 1] - meta.recv_offset[owner];
    const int64_t end = (meta.push_base[owner] + rows) * partial_layout_of(args.header).bytes;
    if (rows > 0 && end > comm.pool_bytes[kCombinePool])
      ok = fail(comm, kTooSmall, kCombine, owner, 0, comm.pool_bytes[kCombinePool], end);
    if (meta.recv_offset[owner + 1] > args.routing.slots)
      ok = fail(comm, kTooSmall, kCombine, owner, 1, args.routing.slots, meta.recv_offset[owner + 1]);
  }
  return __syncthreads_and(ok) != 0;
}

__device__ void read_chunks(const PushArgs& args, Chunks& chunks) {
  const Meta meta = meta_of(args.comm, args.routing);
  for (int i = threadIdx.x; i < args.comm.num_ranks * kMaxChunks; i += blockDim.x)
    chunks.end[i / kMaxChunks][i % kMaxChunks] = meta.recv_chunk_end[i];
  if (threadIdx.x < args.comm.num_ranks) chunks.count[threadIdx.x] = num_chunks(meta.src_tokens[threadIdx.x]);
  __syncthreads();
}

// CTA 0: chunks without rows here have no warp that could signal them.
__device__ void signal_empty_chunks(const Run& run, const Chunks& chunks) {
  for (int i = threadIdx.x; i < run.comm.num_ranks * kMaxChunks; i += blockDim.x) {
    const int owner = i / kMaxChunks, chunk = i % kMaxChunks;
    if (chunk >= chunks.count[owner]) continue;
    const int32_t begin = chunk == 0 ? 0 : chunks.end[owner][chunk - 1], end = chunks.end[owner][chunk];
    if (begin == end) signal_chunk(run, kCombinePool, owner, chunk, begin, end);
  }
}

template <class Element, bool kBulk>
__global__ void __launch_bounds__(kReduceThreads, 1)
    push_kernel(const __grid_constant__ PushArgs args, const __grid_constant__ Cut cut) {
  __shared__ Chunks chunks;
  Run run = enter(args.comm, kCombine);
  if (run.ok) {
    tell_started(run, kCombinePool);
    run.ok = rows_fit(run, args) && open_destinations(run, kCombinePool, args.header);
  }
  if (run.ok) {
    read_chunks(args, chunks);
    if (blockIdx.x == 0) {
      signal_empty_chunks(run, chunks);
      if (threadIdx.x == 0 && meta_of(args.comm, args.routing).recv_offset[args.comm.num_ranks] == 0) hold_at_gate(run);
    }
    PushJob job(run, args, chunks);
    reduce_rows<Element, kBulk>(job, run, cut);
  }
  if (last_to_finish(run) && !faulted(args.comm)) advance(run);
}

template <class Element>
void launch_push(const PushArgs& args) {
  const Room room = room_for<push_kernel<Element, true>>();
  const bool bulk = room.bulk && args.comm.plain == 0;
  const Cut cut =
      make_cut(args.header.row_bytes, kReduceBytes, kReduceWarps, 2 * args.routing.topk, room.shared_bytes, bulk);
  const int64_t shared = shared_bytes_of(cut, kReduceWarps);
  if (bulk)
    launch<push_kernel<Element, true>>("push", args.num_sms, kReduceThreads, shared, args.stream, args, cut);
  else
    launch<push_kernel<Element, false>>("push", args.num_sms, kReduceThreads, shared, args.stream, args, cut);
}

}  // namespace

void push(const PushArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_header(args.header, args.routing);
  require_sms(args.num_sms);
  require_elements(args.header, args.hidden, args.element);
  require_rows("y", args.y);
  require(args.header.weight_bytes == 0 || args.rows == 0 || args.extra != 0, "extra", "an address", 0);
  switch (args.element) {
    case kFloat32:
      return launch_push<Float32>(args);
    case kBFloat16:
      return launch_push<BFloat16>(args);
    case kFloat16:
      return launch_push<Float16>(args);
  }
  throw std::invalid_argument("element: expected float32, bfloat16 or float16 on CUDA, got code " +
                              std::to_string(args.element));
}

}  // namespace ep::cuda
