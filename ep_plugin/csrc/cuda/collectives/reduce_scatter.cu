// Reduce-scatter inside a node: each rank sends its shards to the ranks that sum them, in float32 and in rank order.
//
// Shards move in chunks through cells at the rank that sums. The CTAs of one index on all ranks are a channel with
// its own cells and chunks (channel.cuh). No peer touches a rank's input or output, so these may be any memory, and a
// rank may send before its peers have come to the operation.
//
// Roles. In each CTA, 4 warps send and up to 14 sum. The others exchange signals with the peers (channel.cuh), so that
// these warps poll shared memory only. Sending warps go over the chunks, and for each chunk over the peers, as cells
// become free. Summing warps take rows of the chunks that have arrived from all ranks.
// Buffers. As in channel.cuh. On the bulk path, each sending warp has a ring of two stages in shared memory.
// Memory order. As in channel.cuh.
// Progress. A send waits for the sums of the chunks that used its cell before. A sum waits for the sends of its chunk.
// So the first chunk that is not summed everywhere never waits for a later one. A warp counts all chunks that it has
// sent before it waits for a cell.
// Co-residency. A CTA waits for the CTAs of its index on the peers, so the kernel is launched cooperatively.
// After a fault. The output is filled with 0xFF bytes.
#include "cuda/collectives/channel.cuh"
#include "cuda/core/copy.cuh"
#include "cuda/core/element.cuh"

namespace ep::cuda {

namespace {

constexpr int kInFlight = 4;  // loads of one thread at a time, for each term
constexpr int kTerms = 2;     // ranks whose terms are loaded at a time

// How a lane loads and stores its part of a row: 16 bytes, or one element where a shard is not aligned to 16 bytes.
template <class Element>
struct ElementAccess {
  using Word = typename std::conditional<Element::kPerVector == 4, uint32_t, uint16_t>::type;
  static __device__ __forceinline__ int4 load(const Word* from) {
    const volatile Word* word = from;
    return make_int4(static_cast<int>(*word), 0, 0, 0);
  }
  static __device__ __forceinline__ void store(Word* to, const float* sum) {
    *to = static_cast<Word>(Element::narrow(sum).x);
  }
};
template <class Element>
struct VectorAccess {
  using Word = int4;
  static __device__ __forceinline__ int4 load(const int4* from) { return ptx::ld_coherent(from); }
  static __device__ __forceinline__ void store(int4* to, const float* sum) { *to = Element::narrow(sum); }
};

template <class Element, class Access>
__device__ void sum_row(const ReduceScatterArgs& args, const Channel& channel, int row) {
  using Word = typename Access::Word;
  const int R = args.comm.num_ranks;
  const int64_t begin = channel.row_of_shard(row) * kSumRowBytes;
  const int words = static_cast<int>(min(args.bytes - begin, kSumRowBytes) / static_cast<int64_t>(sizeof(Word)));
  const float scale = static_cast<float>(args.scale);
  for (int first = lane_id(); first < words; first += kInFlight * kWarp) {
    float sums[kInFlight][Element::kPerVector] = {};
    for (int rank = 0; rank < R; rank += kTerms) {
      int4 values[kTerms][kInFlight];
#pragma unroll
      for (int t = 0; t < kTerms; ++t) {
        const Word* from = reinterpret_cast<const Word*>(channel.term(row, min(rank + t, R - 1)));
#pragma unroll
        for (int v = 0; v < kInFlight; ++v) {
          const bool is_there = rank + t < R && first + v * kWarp < words;
          values[t][v] = is_there ? Access::load(from + first + v * kWarp) : make_int4(0, 0, 0, 0);
        }
      }
#pragma unroll
      for (int t = 0; t < kTerms; ++t)
#pragma unroll
        for (int v = 0; v < kInFlight; ++v) Element::add(sums[v], values[t][v], 1.0f);
    }
#pragma unroll
    for (int v = 0; v < kInFlight; ++v) {
      if (first + v * kWarp >= words) continue;
      if (scale != 1.0f)
        for (int e = 0; e < Element::kPerVector; ++e) sums[v][e] *= scale;
      Access::store(at<Word>(args.output, begin) + first + v * kWarp, sums[v]);
    }
  }
}

// The work of a summing warp.
template <class Element, class Access>
__device__ void sum_rows(const ReduceScatterArgs& args, const Channel& channel) {
  const int warps = Roles(args.comm.num_ranks).send;
  int known = 0;
  for (int row = warp_id(); channel.row_of_shard(row) * kSumRowBytes < args.bytes; row += warps) {
    if (!channel.wait_arrived(row, &known)) return;
    sum_row<Element, Access>(args, channel, row);
    channel.count_read(row);
  }
}

// The work of a sending warp. An item is one chunk for one peer; items go over all peers of a chunk in turn.
class ChunkSender {
 public:
  __device__ ChunkSender(const ReduceScatterArgs& args, const Run& run, const Channel& channel)
      : args_(args), run_(run), channel_(channel), items_(channel.chunks() * (args.comm.num_ranks - 1)) {}

  // An item is loaded while the item before it is stored. It is counted when the store of the item after it has begun.
  __device__ void send_bulk(const Cut& cut) const {
    Ring<2> ring(cut);
    const int first = warp_in(cut);
    int uncounted = -1;
    if (first < items_) load(ring, first);
    for (int item = first; item < items_; item += kSendWarps) {
      if (!ring.wait(run_)) break;
      if (!has_room(item, false)) {
        if (uncounted >= 0 && lane_id() == 0) {
          ptx::bulk_wait<0>();
          count(uncounted);
        }
        uncounted = -1;
        if (!has_room(item, true)) break;
      }
      if (lane_id() == 0) {
        peer::store_bulk(there(item), ring.stage(ring.taken), static_cast<uint32_t>(align_up(bytes(item), 16)));
        ptx::bulk_commit();
        ptx::bulk_wait<1>();
      }
      __syncwarp();
      ++ring.taken;
      if (item + kSendWarps < items_) load(ring, item + kSendWarps);
      if (uncounted >= 0 && lane_id() == 0) count(uncounted);
      uncounted = item;
    }
    if (lane_id() == 0) {
      ptx::bulk_wait<0>();
      if (uncounted >= 0) count(uncounted);
    }
    __syncwarp();
  }

  __device__ void send_plain() const {
    for (int item = warp_id() - Roles(args_.comm.num_ranks).send; item < items_; item += kSendWarps) {
      if (!has_room(item, true)) return;
      copy_bytes(there(item), here(item), bytes(item));
      __syncwarp();
      if (lane_id() == 0) count(item);
    }
  }

 private:
  __device__ int chunk(int item) const { return item / (args_.comm.num_ranks - 1); }
  __device__ int peer(int item) const {
    const int R = args_.comm.num_ranks;
    return (args_.comm.rank + 1 + item % (R - 1)) % R;
  }
  __device__ bool has_room(int item, bool may_wait) const {
    return channel_.has_room(chunk(item), peer(item), may_wait);
  }
  __device__ const char* here(int item) const { return channel_.chunk_for(chunk(item), peer(item)); }
  __device__ char* there(int item) const { return channel_.cell(peer(item), args_.comm.rank, chunk(item)); }
  __device__ int64_t bytes(int item) const { return channel_.chunk_bytes(chunk(item)); }
  __device__ void count(int item) const { channel_.count_sent(chunk(item), peer(item)); }

  // All lanes. If the chunk is not aligned to 16 bytes, the lanes copy it into the stage.
  __device__ void load(Ring<2>& ring, int item) const {
    if ((reinterpret_cast<uint64_t>(here(item)) | static_cast<uint64_t>(bytes(item))) % 16 == 0)
      return ring.load(here(item), bytes(item));
    copy_bytes(ring.stage(ring.issued), here(item), bytes(item));
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (lane_id() == 0) ptx::mbarrier_arrive_expect_tx(ring.full + ring.issued % 2, 0);
    ++ring.issued;
  }

  const ReduceScatterArgs& args_;
  const Run& run_;
  const Channel& channel_;
  const int items_;
};

// kBulk: chunks are sent by bulk copies.
template <class Element, class Access, bool kBulk>
__global__ void __launch_bounds__(kThreads, 1) ep_reduce_scatter(const __grid_constant__ ReduceScatterArgs args,
                                                                 const __grid_constant__ Cut cut, int chunk_shift) {
  __shared__ Counters counters;
  counters.clear();
  const Run run = enter_collective(args.comm, kReduceScatter);
  DeviceControl& control = device_control(args.comm, args.comm.rank);
  const Channel channel(args, run, chunk_shift, counters);
  if (run.ok) {
    signal_size(run, args.bytes);
    const Roles first(args.comm.num_ranks);
    if (warp_id() < first.send)
      sum_rows<Element, Access>(args, channel);
    else if (warp_id() >= first.send_signal)
      channel.signal_arrived();
    else if (warp_id() == first.recv_signal)
      channel.signal_consumed();
    else if constexpr (kBulk)
      ChunkSender(args, run, channel).send_bulk(cut);
    else
      ChunkSender(args, run, channel).send_plain();
  }
  const bool ok = __syncthreads_or(faulted(args.comm)) == 0;
  // In each CTA that fails, because others may succeed.
  if (!ok) fill_bytes(args.output, args.bytes, 0xFF, threadIdx.x, blockDim.x);
  if (ok && threadIdx.x == 0) control.chunks[blockIdx.x] += static_cast<uint64_t>(channel.chunks());
  leave_collective(run, ok);
}

// log2 of the rows of a chunk: as many rows as fit, but few enough that each sending warp gets an item.
int chunk_shift_of(const ReduceScatterArgs& args) {
  const int64_t rows = ceil_div(args.bytes, kSumRowBytes * args.num_ctas);  // of a channel
  int shift = 0;
  while (2 << shift <= kMaxChunkRows && rows * (args.comm.num_ranks - 1) >= 2 * kSendWarps << shift) ++shift;
  return shift;
}

template <class Element, class Access>
void launch_sum(const ReduceScatterArgs& args) {
  Cut cut = cut_row(kChannelCellBytes, kChannelCellBytes, kSendWarps, 2, 0);
  cut.first_warp = Roles(args.comm.num_ranks).send;
  const KernelLimits limits = limits_of<ep_reduce_scatter<Element, Access, true>>();
  if (limits.bulk && cut.shared_bytes() <= limits.shared_bytes)
    launch_cooperatively<ep_reduce_scatter<Element, Access, true>>(
        "reduce-scatter", args.num_ctas, kThreads, cut.shared_bytes(), args.stream, args, cut, chunk_shift_of(args));
  else
    launch_cooperatively<ep_reduce_scatter<Element, Access, false>>("reduce-scatter", args.num_ctas, kThreads, 0,
                                                                    args.stream, args, cut, chunk_shift_of(args));
}

template <class Element>
void sum(const ReduceScatterArgs& args) {
  const uint64_t own = args.inputs[args.comm.rank];  // all other terms are in cells, which are aligned
  if (unit_of(args.output | static_cast<uint64_t>(args.bytes) | own) == 16)
    return launch_sum<Element, VectorAccess<Element>>(args);
  launch_sum<Element, ElementAccess<Element>>(args);
}

}  // namespace

void reduce_scatter(const ReduceScatterArgs& args) {
  require_node(args.comm);
  require(args.bytes > 0, "bytes", "1 or more", args.bytes);
  require(args.num_ctas >= 1 && args.num_ctas <= kMaxChannels, "num_ctas", "1 to 64", args.num_ctas);
  switch (args.element) {
    case kFloat32:
      return sum<Float32>(args);
    case kBFloat16:
      return sum<BFloat16>(args);
    case kFloat16:
      return sum<Float16>(args);
    default:
      require(false, "element", "0 to 2 on CUDA", args.element);
  }
}

}  // namespace ep::cuda
