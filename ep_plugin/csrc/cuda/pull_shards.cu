// Reduce-scatter inside a node: each rank loads its shard from all inputs and sums in float32, in rank order.
//
// Every CTA has parts of the shard; see rendezvous.cuh for how it meets the CTAs of its index. What it loads lies in
// peers' memory, and must be many bytes at a time: rows of a shard that lies on 16 bytes come through shared memory in
// bulk (reduce.cuh), a row's term from each rank. The rest, and other shards, are loaded by threads, several words of
// one source under way before the first is added.
#include "copy.cuh"
#include "reduce.cuh"
#include "rendezvous.cuh"

namespace ep::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kAhead = 4;  // vectors of one thread under way
constexpr int64_t kRowBytes = kLaneVectors * kLanesBytes;

// The whole rows of a shard, in turns over all warps. A term's row says which row of the shard and, as the rest, of
// which rank.
class PullJob {
 public:
  static constexpr bool kScales = true;
  struct Row {
    int32_t index;
    int32_t piece;
  };

  __device__ PullJob(const PullShardsArgs& args, const Cut& cut)
      : args_(args), team_(team_of_warps(cut.warps)), next_(team_.index) {}

  __device__ Next next(bool, Row* row) {
    if (next_ >= args_.bytes / kRowBytes) return kEnd;
    *row = Row{static_cast<int32_t>(next_), 0};
    next_ += team_.size;
    return kRow;
  }
  __device__ int describe(const Row& row, Term* terms) const {
    const int R = args_.comm.num_ranks;
    if (lane_id() < R) terms[lane_id()] = Term{row.index * R + lane_id(), 1.0f};
    return R;
  }
  __device__ const char* source(int32_t term) const {
    const int R = args_.comm.num_ranks;
    return at<const char>(args_.sources[term % R], term / R * kRowBytes);
  }
  __device__ char* target(const Row& row) const { return at<char>(args_.output, row.index * kRowBytes); }
  __device__ const char* bias(const Row&) const { return nullptr; }
  __device__ float scale() const { return static_cast<float>(args_.scale); }
  __device__ void settle(const Row&, Term*) const {}
  __device__ void ahead(int, int) const {}
  __device__ void finish(const Row&) const {}
  __device__ void completed(uint32_t) const {}

 private:
  const PullShardsArgs& args_;
  const Team team_;
  int64_t next_;
};

// One element as the lowest of a vector, for shards that do not lie on 16 bytes.
template <class Element>
struct Single {
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
struct Whole {
  using Word = int4;
  static __device__ __forceinline__ int4 load(const int4* from) { return ptx::ld_coherent(from); }
  static __device__ __forceinline__ void store(int4* to, const float* sum) { *to = Element::narrow(sum); }
};

// From byte `from` of the shard on.
template <class Element, class Access>
__device__ void sum_span(const PullShardsArgs& args, int64_t from_byte) {
  using Word = typename Access::Word;
  const int64_t before = from_byte / static_cast<int64_t>(sizeof(Word));
  const int64_t words = args.bytes / static_cast<int64_t>(sizeof(Word)) - before;
  const int64_t begin = before + words * blockIdx.x / gridDim.x, end = before + words * (blockIdx.x + 1) / gridDim.x;
  const float scale = static_cast<float>(args.scale);
  for (int64_t first = begin + threadIdx.x; first < end; first += kAhead * kThreads) {
    float sums[kAhead][Element::kPerVector] = {};
#pragma unroll 2
    for (int r = 0; r < args.comm.num_ranks; ++r) {
      const Word* from = at<const Word>(args.sources[r]);
      int4 values[kAhead];
#pragma unroll
      for (int v = 0; v < kAhead; ++v) {
        const int64_t i = first + v * kThreads;
        values[v] = i < end ? Access::load(from + i) : make_int4(0, 0, 0, 0);
      }
#pragma unroll
      for (int v = 0; v < kAhead; ++v) Element::add(sums[v], values[v], 1.0f);
    }
#pragma unroll
    for (int v = 0; v < kAhead; ++v) {
      const int64_t i = first + v * kThreads;
      if (i >= end) continue;
      if (scale != 1.0f)
        for (int e = 0; e < Element::kPerVector; ++e) sums[v][e] *= scale;
      Access::store(at<Word>(args.output) + i, sums[v]);
    }
  }
}

// kBulk: whole rows in bulk.
template <class Element, class Access, bool kBulk>
__global__ void __launch_bounds__(kThreads, 1)
    pull_kernel(const __grid_constant__ PullShardsArgs args, const __grid_constant__ Cut cut) {
  const int cta = static_cast<int>(blockIdx.x);
  const Run run = enter_collective(args.comm, kScatter);
  bool ok = run.ok && meet_before(run, cta, args.bytes, args.place);
  if (ok) {
    if constexpr (kBulk) {
      ptx::fence_proxy_async();
      PullJob job(args, cut);
      reduce_rows<Element, true>(job, run, cut);
    }
    sum_span<Element, Access>(args, kBulk ? args.bytes / kRowBytes * kRowBytes : 0);
    ok = meet_after(run, cta);
  }
  if (!ok) fill_bytes(args.output, args.bytes, 0xFF, threadIdx.x, blockDim.x);  // each CTA that fails: others may not
  leave_collective(run, ok);
}

template <auto kKernel>
void launch_pull(const PullShardsArgs& args, const Cut& cut) {
  launch_cooperatively<kKernel>("reduce-scatter", args.num_ctas, kThreads, cut.shared_bytes(), args.stream, args, cut);
}

template <class Element>
void pull(const PullShardsArgs& args) {
  uint64_t bits = args.output | static_cast<uint64_t>(args.bytes);
  for (int r = 0; r < args.comm.num_ranks; ++r) bits |= args.sources[r];
  if (unit_of(bits) != 16) return launch_pull<pull_kernel<Element, Single<Element>, false>>(args, Cut{});
  constexpr auto kBulk = pull_kernel<Element, Whole<Element>, true>;
  const Room room = room_for<kBulk>();
  if (!room.bulk) return launch_pull<pull_kernel<Element, Whole<Element>, false>>(args, Cut{});
  const int terms = 2 * args.comm.num_ranks;
  launch_pull<kBulk>(args, cut_for_sums(kRowBytes, INT32_MAX, kThreads / kWarp, terms, room.shared_bytes, true));
}

}  // namespace

void pull_shards(const PullShardsArgs& args) {
  require_node(args.comm);
  require(args.bytes > 0, "bytes", "1 or more", args.bytes);
  require(args.num_ctas >= 1 && args.num_ctas <= kMostCtas, "num_ctas", "1 to 128", args.num_ctas);
  switch (args.element) {
    case kFloat32:
      return pull<Float32>(args);
    case kBFloat16:
      return pull<BFloat16>(args);
    case kFloat16:
      return pull<Float16>(args);
    default:
      require(false, "element", "0 to 2 on CUDA", args.element);
  }
}

}  // namespace ep::cuda
