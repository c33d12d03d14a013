// All-gather inside a node: each rank stores its shard into its peers' outputs.
//
// Copy engines move large shards and use no SM. Each rank starts with the next rank, so that no two ranks write to one
// receiver at the same time. The streams themselves write and wait for the words of the handshakes before and after the
// copies (stream_words.h). In a CUDA graph, which would repeat the values of those words, kernels of one CTA do it.
// One kernel moves smaller shards: each CTA stores its part of the shard between two barriers (barrier.cuh).
// Shards for outputs that peers have not mapped go to the staging block. The receiver copies them to its outputs.
//
// Roles. In the kernel, all threads of a CTA copy the CTA's part of the shard to all peers, in turn.
// Memory order. As in barrier.cuh. Stream operations write after all earlier work of the stream, with a system fence.
// After a fault. Kernels fill the outputs with 0xFF bytes. Without kernels, the host finds the fault.
#include <cstddef>

#include "cuda/collectives/barrier.cuh"
#include "cuda/collectives/stream_words.h"
#include "cuda/core/copy.cuh"

namespace ep::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 4;  // units that one thread loads at a time

template <class Unit>
struct Span {
  int64_t begin, end;
};

// This CTA's units of a shard. They are the same bytes on every rank, for any alignment of the addresses, because a CTA
// waits only for the CTAs of its index.
template <class Unit>
__device__ Span<Unit> span_of(int64_t bytes) {
  constexpr int64_t kLargest = 16, kSize = sizeof(Unit);
  const int64_t parts = ceil_div(bytes, kLargest);
  const int64_t begin = kLargest * (parts * blockIdx.x / gridDim.x);
  const int64_t end = kLargest * (parts * (blockIdx.x + 1) / gridDim.x);
  return {begin / kSize, min(end, bytes) / kSize};
}

// Every CTA that fails calls it, because others may succeed. Also fills the staging block, which is copied to outputs
// later.
__device__ void poison(const AllGatherArgs& args) {
  const Comm& comm = args.comm;
  for (int r = 0; r < comm.num_ranks; ++r) {
    if (r == comm.rank) continue;
    fill_bytes(args.outputs[r], args.bytes, 0xFF, threadIdx.x, blockDim.x);
    if (args.staging != 0)
      fill_bytes(args.staging + static_cast<uint64_t>(r * args.bytes), args.bytes, 0xFF, threadIdx.x, blockDim.x);
  }
}

// Where this rank's shard goes on another one. blocks: of `args`, in memory that the caller can read.
EP_HD Address target(const AllGatherArgs& args, Address blocks, int rank) {
  return address_in(blocks, rank) + static_cast<uint64_t>(args.offset);
}

// Copies this CTA's units from `from` to the addresses to(0), ..., to(count - 1). A thread loads several units before
// it stores the first. Peers may have written the source.
template <class Unit, class To>
__device__ void copy_span(const AllGatherArgs& args, const Unit* from, int count, To to) {
  const Span<Unit> span = span_of<Unit>(args.bytes);
  for (int64_t first = span.begin + threadIdx.x; first < span.end; first += kInFlight * kThreads) {
    Unit values[kInFlight] = {};
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * kThreads < span.end) values[v] = load_shared(from + first + v * kThreads);
    for (int index = 0; index < count; ++index) {
      const Address address = to(index);
#pragma unroll
      for (int v = 0; v < kInFlight; ++v)
        if (first + v * kThreads < span.end) at<Unit>(address)[first + v * kThreads] = values[v];
    }
  }
}

template <class Unit>
__device__ void send_span(const AllGatherArgs& args) {
  const Comm& comm = args.comm;
  copy_span(args, at<const Unit>(args.input), comm.num_ranks - 1,
            [&](int index) { return target(args, args.blocks, (comm.rank + 1 + index) % comm.num_ranks); });
}

template <class Unit>
__device__ void fetch_span(const AllGatherArgs& args) {
  for (int r = 0; r < args.comm.num_ranks; ++r)
    if (r != args.comm.rank)
      copy_span(args, at<const Unit>(args.staging, r * args.bytes), 1, [&](int) { return args.outputs[r]; });
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) ep_all_gather(const __grid_constant__ AllGatherArgs args) {
  const int cta = static_cast<int>(blockIdx.x);
  peer::prefetch(args.blocks, args.comm.num_ranks);
  const Run run = enter_collective(args.comm, kAllGather);
  bool ok = run.ok && barrier_before(run, cta, args.bytes, args.place);
  if (ok) {
    send_span<Unit>(args);
    ok = barrier_after(run, cta);
  }
  if (ok && args.staging != 0) fetch_span<Unit>(args);
  if (!ok) poison(args);
  leave_collective(run, ok);
}

// The handshakes of copy engines in a CUDA graph: one CTA.
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
  for (int step = 1; step < comm.num_ranks; ++step)
    copy(target(args, args.host_blocks, (comm.rank + step) % comm.num_ranks), args.input, args.bytes, args.stream);
}

void copy_from_staging(const AllGatherArgs& args) {
  if (args.staging == 0) return;
  for (int r = 0; r < args.comm.num_ranks; ++r)
    if (r != args.comm.rank)
      copy(args.outputs[r], args.staging + static_cast<uint64_t>(r * args.bytes), args.bytes, args.stream);
}

Address word_at(const AllGatherArgs& args, int owner, bool done, int peer) {
  const int64_t words = done ? offsetof(StreamWords, done) : offsetof(StreamWords, ready);
  return address_in(args.stream_words, owner) + static_cast<uint64_t>(words) +
         sizeof(uint64_t) * static_cast<uint64_t>(args.block * kMaxRanks + peer);
}

// Enqueues one handshake: writes this operation's number to all peers, then waits for theirs.
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
    launch<ep_all_gather_begin>("all_gather begin", 1, kThreads, 0, args.stream, args);
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
  require(args.num_ctas >= 0 && args.num_ctas <= kMaxCtas, "num_ctas", "0 to 128", args.num_ctas);
  if (args.num_ctas == 0) return gather_by_engines(args);
  uint64_t bits = args.input | static_cast<uint64_t>(args.bytes | args.offset) | args.staging;  // blocks are aligned
  for (int r = 0; r < args.comm.num_ranks; ++r) bits |= args.outputs[r];
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
