// Reduce-scatter inside a node: each rank loads its shard from all inputs and sums in float32, in rank order.
//
// Every CTA has a part of the shard; see rendezvous.cuh for how it meets the CTAs of its index. What it loads lies in
// peers' memory: several vectors of one source are under way before the first is added, and sources follow each other.
#include "element.cuh"
#include "rendezvous.cuh"

namespace ep::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kAhead = 4;  // vectors of one thread under way

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

template <class Element, class Access>
__device__ void sum_span(const PullShardsArgs& args) {
  using Word = typename Access::Word;
  const int64_t words = args.bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t begin = words * blockIdx.x / gridDim.x, end = words * (blockIdx.x + 1) / gridDim.x;
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

template <class Element, class Access>
__global__ void __launch_bounds__(kThreads) pull_kernel(const __grid_constant__ PullShardsArgs args) {
  const int cta = static_cast<int>(blockIdx.x);
  const Run run = enter_collective(args.comm, kScatter);
  bool ok = run.ok && meet_before(run, cta, args.bytes, args.place);
  if (ok) {
    sum_span<Element, Access>(args);
    ok = meet_after(run, cta);
  }
  if (!ok) {
    unsigned char* to = at<unsigned char>(args.output);
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < args.bytes;
         i += static_cast<int64_t>(gridDim.x) * kThreads)
      to[i] = 0xFF;
  }
  leave_collective(run, ok);
}

template <class Element>
void pull(const PullShardsArgs& args) {
  uint64_t bits = args.output | static_cast<uint64_t>(args.bytes);
  for (int r = 0; r < args.comm.num_ranks; ++r) bits |= args.sources[r];
  if (unit_of(bits) == 16)
    launch_cooperatively<pull_kernel<Element, Whole<Element>>>("reduce-scatter", args.num_ctas, kThreads, 0,
                                                               args.stream, args);
  else
    launch_cooperatively<pull_kernel<Element, Single<Element>>>("reduce-scatter", args.num_ctas, kThreads, 0,
                                                                args.stream, args);
}

}  // namespace

void pull_shards(const PullShardsArgs& args) {
  require_node(args.comm);
  require(args.bytes > 0, "bytes", "1 or more", args.bytes);
  require(args.num_ctas >= 1 && args.num_ctas <= kMostCtas, "num_ctas", "1 to 32", args.num_ctas);
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
