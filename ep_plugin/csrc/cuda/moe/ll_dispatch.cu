// Low-latency dispatch: sends rows to fixed slots, and copies slots to output rows as they arrive. There is no plan
// and no host step. common/low_latency.h has the layout and the protocol.
//
// Roles. All workers send; then all workers receive. The last warp of each CTA signals the CTA's rows meanwhile.
//   Words    The workers of all CTAs share the header and the ids for all peers, 32 words to a warp.
//   Rows     A CTA sends whole groups of tokens. Its warps share the rows in pieces of 32 lanes x 16 bytes. A lane
//            loads its part of x once, quantises it in registers, and stores it to every rank that needs the row.
//   Flags    The signalling warp fences once for the CTA's groups, then stores their flags.
//   Places   Every CTA waits for the ids of all sources, and computes the rows of its share of their tokens by itself.
//            Some CTAs also write the tables of counts. In a small dispatch every warp places its own token, or writes
//            tables (ll_dispatch_small.cuh).
//   Copies   Warps wait for the flag of a token's group, load a piece of its slot once, and store it to all its rows.
//
// Buffers. Words, flags and slots are in the block of the rank that reads them. Shared memory has the experts of pairs,
// and their counts by expert.
//
// Memory order. See low_latency.cuh.
//
// Co-residency. With both halves, the kernel sends and waits for rows, so it is launched cooperatively. The send half
// alone waits only for signals of earlier kernels of peers. The receive half alone sends nothing that others wait for
// before it ends.
//
// After a fault. Nothing is signalled. The tables of counts are zeros.
#include "cuda/moe/kernels.h"
#include "cuda/moe/ll_dispatch_recv.cuh"
#include "cuda/moe/ll_dispatch_send.cuh"
#include "cuda/moe/ll_dispatch_small.cuh"

namespace ep::cuda {

namespace {

constexpr int kMostWorkers = 19;  // with more, a thread has too few registers
constexpr int kMaxThreads = (kMostWorkers + 1) * kWarp;

// From: the element type of rows that are quantised, or AsTheyAre.
template <class From>
__device__ void send(const LlRun& ll, const LlDispatchArgs& args, int32_t* written) {
  if (warp_id() == num_workers()) return signal_rows(ll, args, written);
  send_ids(ll, args);
  if (blockIdx.x == gridDim.x - 1) {  // the CTA that has the first row
    if (threadIdx.x == 0) hold_at_gate(ll.run);
    join_workers();
  }
  send_rows_to_slots<From>(ll, args, written);
}

// Workers. False after a fault. kAlwaysSmall: see ll_always_small.
template <bool kAlwaysSmall>
__device__ bool receive(const LlRun& ll, const LlDispatchArgs& args) {
  __shared__ Placed placed;
  LlSmallReceiver small(ll, args, placed);
  if (!small.open()) return false;
  const bool is_small = kAlwaysSmall || small.serves();
  bool ok = true;
  if (!is_small) ok = LlReceiver(ll, args, placed).run();
  __syncwarp();  // keeps the code in this order
  if (is_small) ok = small.run();
  return ok;
}

// All threads of a CTA: sets the tables to zeros after a fault.
__device__ void clear_tables(const LlDispatchArgs& args) {
  const Comm& comm = args.op.comm;
  const int R = comm.num_ranks, per_rank = local_experts(comm);
  const LlPlan plan = ll_plan_of(args.op, args.plan);
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
#pragma unroll 1
  for (int i = first; i < per_rank * R; i += step) plan.layout_range[i] = 0;
#pragma unroll 1
  for (int i = first; i < R; i += step) plan.src_tokens[i] = 0;
#pragma unroll 1
  for (int i = first; i < per_rank; i += step) at<int32_t>(args.expert_count)[i] = 0;
#pragma unroll 1
  for (int i = first; i <= per_rank; i += step) at<int32_t>(args.expert_offset)[i] = 0;
}

// Profilers show one kernel for both halves, so the phases are no template parameter. Tools of DeepEP find "::dispatch"
// in its name.
namespace dispatch {

template <class From, bool kAlwaysSmall>
__global__ void __launch_bounds__(kMaxThreads, 1)
    ep_ll_dispatch(const __grid_constant__ LlDispatchArgs args, const __grid_constant__ LlLayout lay) {
  __shared__ LlPeers peers;
  __shared__ int32_t written;  // counts the batches that worker warps have written
  const bool sends = (args.op.phases & kLlSend) != 0, receives = (args.op.phases & kLlReceive) != 0;
  if (threadIdx.x == 0) written = 0;
  LlRun ll = ll_half(args.op, lay, kLlDispatch, sends ? kLlSend : kLlReceive, ll_epoch(args.op, kLlDispatch), peers);
  bool ok = ll_enter(ll, peers);
  if (ok) {
    const bool works = warp_id() < num_workers();
    if (sends && !works) ll_begin_send(ll);
    if (sends) send<From>(ll, args, &written);
    if (receives && works)
      ok = receive<kAlwaysSmall>(ll_half(args.op, lay, kLlDispatch, kLlReceive, ll.run.epoch, peers), args);
  }
  if (!ll_leave(ll, ok) && receives) clear_tables(args);
}

}  // namespace dispatch

template <class From, bool kAlwaysSmall>
void launch_kernel(const LlDispatchArgs& args) {
  constexpr auto kKernel = dispatch::ep_ll_dispatch<From, kAlwaysSmall>;
  const LlOperation& op = args.op;
  const int64_t image_bytes = ll_image_bytes(op.header.row_bytes, op.header.scale_bytes);
  const int64_t limit = limits_of<kKernel>().shared_bytes;
  const int64_t counts = (op.phases & kLlReceive) == 0 ? 0 : placed_bytes(op.comm.num_ranks, local_experts(op.comm));
  require(counts <= limit, "experts of a rank", "as many as shared memory has room for", local_experts(op.comm));
  const int threads = ll_threads(op, ceil_div(image_bytes, kUnitBytes * kWarp), kMostWorkers);
  const LlLayout lay = ll_layout(op.comm.num_ranks, op.shape);
  const auto launch_it = op.phases == (kLlSend | kLlReceive) ? launch_cooperatively<kKernel, LlDispatchArgs, LlLayout>
                                                             : launch<kKernel, LlDispatchArgs, LlLayout>;
  launch_it("low-latency dispatch", op.num_sms, threads, counts, op.stream, args, lay);
}

template <class From>
void launch_from(const LlDispatchArgs& args) {
  return ll_always_small(args.op) ? launch_kernel<From, true>(args) : launch_kernel<From, false>(args);
}

void require_ll_dispatch(const LlDispatchArgs& args) {
  const LlOperation& op = args.op;
  const LlHeader& header = op.header;
  require_ll(op, ll_image_bytes(header.row_bytes, header.scale_bytes));
  require(header.format >= kLlPlain && header.format <= kLlE4m3Ue8m0, "format", "0 to 3", header.format);
  const int64_t blocks = header.format == kLlPlain ? 0 : ceil_div(header.row_bytes, kScaleBlock);
  const int64_t scales = header.format == kLlE4m3Ue8m0 ? align_up(blocks, 4) : blocks * kScaleBytes;
  require(header.scale_bytes == scales, "scale_bytes", std::to_string(scales).c_str(), header.scale_bytes);
  require(args.id_bytes == 4 || args.id_bytes == 8, "id_bytes", "4 or 8", args.id_bytes);
  if ((op.phases & kLlSend) != 0) {
    require_rows("x", args.x, header.num_tokens > 1 ? args.x_stride : 0);
    if (header.format != kLlPlain) require_quantizable(args.element);
  }
  if ((op.phases & kLlReceive) != 0) require_rows("tokens", args.tokens);
}

}  // namespace

void ll_dispatch(const LlDispatchArgs& args) {
  require_ll_dispatch(args);
  if (args.op.header.format == kLlPlain) return launch_from<AsTheyAre>(args);
  switch (args.element) {
    case kFloat32:
      return launch_from<FromFloat32>(args);
    case kBFloat16:
      return launch_from<FromBFloat16>(args);
    default:
      return launch_from<FromFloat16>(args);
  }
}

}  // namespace ep::cuda
