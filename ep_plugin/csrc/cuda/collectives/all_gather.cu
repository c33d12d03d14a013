// All-gather inside a node: each rank sends its shard to its peers' outputs.
//
// Large shards: copy engines, and no SM. Each rank starts with the next rank, so that no two ranks write to one
// receiver at the same time. Streams write and wait for the handshake words themselves (stream_words.h). In a CUDA
// graph, which would freeze the values of those words, kernels of one CTA do the handshake.
// Small shards: one kernel, where each CTA sends its part of the shard between two barriers (barrier.cuh).
// An output that peers have not mapped is copied from the staging block afterwards, by the kernel or a copy engine.
#include <cstddef>

#include "cuda/collectives/barrier.cuh"
#include "cuda/collectives/stream_words.h"
#include "cuda/core/copy.cuh"

namespace ep::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kAhead = 4;  // units of one thread under way

template <class Unit>
struct Span {
  int64_t begin, end;
};

// This CTA's units of a shard. They are the same bytes on every rank, whatever the alignment of the addresses, because
// a CTA waits only for the CTAs of its index.
template <class Unit>
__device__ Span<Unit> span_of(int64_t bytes) {
  constexpr int64_t kLargest = 16, kSize = sizeof(Unit);
  const int64_t parts = ceil_div(bytes, kLargest);
  const int64_t begin = kLargest * (parts * blockIdx.x / gridDim.x);
  const int64_t end = kLargest * (parts * (blockIdx.x + 1) / gridDim.x);
  return {begin / kSize, min(end, bytes) / kSize};
}

// Every CTA that fails calls it; others may not fail. Also fills the part of the staging block that is copied later.
__device__ void poison(const AllGatherArgs& args) {
  const Comm& comm = args.comm;
  for (int r = 0; r < comm.num_ranks; ++r) {
    if (r == comm.rank) continue;
    fill_bytes(args.outputs[r], args.bytes, 0xFF, threadIdx.x, blockDim.x);
    if (args.landing != 0)
      fill_bytes(args.landing + static_cast<uint64_t>(r * args.bytes), args.bytes, 0xFF, threadIdx.x, blockDim.x);
  }
}

template <class Unit>
__device__ __forceinline__ Unit load(const Unit* from) {
  const volatile Unit* word = from;
  return *word;
}
template <>
__device__ __forceinline__ int4 load<int4>(const int4* from) {
  return ptx::ld_coherent(from);
}

// Copies this CTA's units from `from` to every address that `to` (an int index below `count`) gives; 0: none. Several
// units of a thread are under way before the first is stored. Peers may have written the source.
template <class Unit, class To>
__device__ void copy_span(const AllGatherArgs& args, const Unit* from, int count, To to) {
  const Span<Unit> span = span_of<Unit>(args.bytes);
  for (int64_t first = span.begin + threadIdx.x; first < span.end; first += kAhead * kThreads) {
    Unit values[kAhead] = {};
#pragma unroll
    for (int v = 0; v < kAhead; ++v)
      if (first + v * kThreads < span.end) values[v] = load(from + first + v * kThreads);
    for (int index = 0; index < count; ++index) {
      const Address address = to(index);
      if (address == 0) continue;
#pragma unroll
      for (int v = 0; v < kAhead; ++v)
        if (first + v * kThreads < span.end) at<Unit>(address)[first + v * kThreads] = values[v];
    }
  }
}

template <class Unit>
__device__ void send_span(const AllGatherArgs& args) {
  const Comm& comm = args.comm;
  copy_span(args, at<const Unit>(args.input), comm.num_ranks,
            [&](int index) { return args.targets[(comm.rank + 1 + index) % comm.num_ranks]; });
}

template <class Unit>
__device__ void fetch_span(const AllGatherArgs& args) {
  for (int r = 0; r < args.comm.num_ranks; ++r)
    if (r != args.comm.rank)
      copy_span(args, at<const Unit>(args.landing, r * args.bytes), 1, [&](int) { return args.outputs[r]; });
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) ep_all_gather(const __grid_constant__ AllGatherArgs args) {
  const int cta = static_cast<int>(blockIdx.x);
  const Run run = enter_collective(args.comm, kAllGather);
  bool ok = run.ok && barrier_before(run, cta, args.bytes, args.place);
  if (ok) {
    send_span<Unit>(args);
    ok = barrier_after(run, cta);
  }
  if (ok && args.landing != 0) fetch_span<Unit>(args);
  if (!ok) poison(args);
  leave_collective(run, ok);
}

// In a graph, before and after the copies: one CTA, one thread for each peer.
__global__ void ep_all_gather_begin(const __grid_constant__ AllGatherArgs args) {
  const Run run = enter_collective(args.comm, kAllGather);
  if (run.ok) barrier_before(run, 0, args.bytes, args.place);
}
__global__ void ep_all_gather_end(const __grid_constant__ AllGatherArgs args) {
  const Run run = enter_collective(args.comm, kAllGather);
  const bool ok = run.ok && barrier_after(run, 0);
  if (!ok) poison(args);
  leave_collective(run, ok);
}

void copy(Address to, Address from, int64_t bytes, Address stream) {
  throw_on_error(cudaMemcpyAsync(at<char>(to), at<const char>(from), static_cast<size_t>(bytes),
                                 cudaMemcpyDeviceToDevice, stream_of(stream)),
                 "cudaMemcpyAsync");
}

void copy_to_peers(const AllGatherArgs& args) {
  const Comm& comm = args.comm;
  for (int step = 1; step <= comm.num_ranks; ++step) {
    const Address to = args.targets[(comm.rank + step) % comm.num_ranks];
    if (to != 0) copy(to, args.input, args.bytes, args.stream);
  }
}

void copy_from_staging(const AllGatherArgs& args) {
  if (args.landing == 0) return;
  for (int r = 0; r < args.comm.num_ranks; ++r)
    if (r != args.comm.rank)
      copy(args.outputs[r], args.landing + static_cast<uint64_t>(r * args.bytes), args.bytes, args.stream);
}

Address word_at(const AllGatherArgs& args, int owner, bool done, int peer) {
  const int64_t words = done ? offsetof(StreamWords, done) : offsetof(StreamWords, ready);
  return args.stream_words[owner] + static_cast<uint64_t>(words) +
         sizeof(uint64_t) * static_cast<uint64_t>(args.block * kMaxRanks + peer);
}

// Words of this operation at all peers, then the same words from all of them.
void handshake(const AllGatherArgs& args, bool done) {
  const Comm& comm = args.comm;
  StreamOperations words;
  if (!done) words.write(args.begun, args.number);
  for (int step = 1; step < comm.num_ranks; ++step)
    words.write(word_at(args, (comm.rank + step) % comm.num_ranks, done, comm.rank), args.number);
  for (int step = 1; step < comm.num_ranks; ++step)
    words.wait(word_at(args, comm.rank, done, (comm.rank + step) % comm.num_ranks), args.number);
  if (done) words.write(args.finished, args.number);
  words.enqueue(stream_of(args.stream));
}

void gather_by_engines(const AllGatherArgs& args) {
  if (args.captured != 0)
    launch<ep_all_gather_begin>("all_gather begin", 1, kWarp, 0, args.stream, args);
  else
    handshake(args, false);
  copy_to_peers(args);
  if (args.captured != 0)
    launch<ep_all_gather_end>("all_gather end", 1, kThreads, 0, args.stream, args);
  else
    handshake(args, true);
  copy_from_staging(args);
}

template <class Unit>
void gather_by_kernel(const AllGatherArgs& args) {
  launch_cooperatively<ep_all_gather<Unit>>("all_gather", args.num_ctas, kThreads, 0, args.stream, args);
}

}  // namespace

void all_gather(const AllGatherArgs& args) {
  require_node(args.comm);
  require(args.bytes > 0, "bytes", "1 or more", args.bytes);
  require(args.block >= 0 && args.block <= kStagingBlock, "block", "0 to 64", args.block);
  require(args.num_ctas >= 0 && args.num_ctas <= kMostCtas, "num_ctas", "0 to 128", args.num_ctas);
  if (args.num_ctas == 0) return gather_by_engines(args);
  uint64_t bits = args.input | static_cast<uint64_t>(args.bytes) | args.landing;
  for (int r = 0; r < args.comm.num_ranks; ++r) bits |= args.targets[r] | args.outputs[r];
  switch (unit_of(bits)) {
    case 16:
      return gather_by_kernel<int4>(args);
    case 8:
      return gather_by_kernel<uint64_t>(args);
    case 4:
      return gather_by_kernel<uint32_t>(args);
    case 2:
      return gather_by_kernel<uint16_t>(args);
    default:
      return gather_by_kernel<unsigned char>(args);
  }
}

}  // namespace ep::cuda
