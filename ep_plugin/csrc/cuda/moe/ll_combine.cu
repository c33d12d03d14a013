// Low-latency combine: expert rows are weighted and reduced where they are, and one partial row for each (token, rank)
// goes to the token's owner, who adds them. common/low_latency.h has the layout and the protocol.
//
// Roles. All workers send; then all workers receive. The last warp of each CTA signals the CTA's partial rows
// meanwhile.
//   Weights  The workers of all CTAs share the header and the weights of all tokens for all peers, 32 words to a warp.
//   Lists    A CTA sends whole groups of owners' tokens. One warp for each token waits for its weights, and lists the
//            rows that are named.
//   Sums     The CTA's warps share its tokens in pieces of 32 lanes x 16 bytes. A lane sums its part of a token's rows
//            in the order of k, rounds once, and stores it into the owner's slot.
//   Flags    The signalling warp fences once for the CTA's groups, then stores their flags.
//   Receive  Warps wait for the flags of a token's holders, one lane each, and add a piece of the partial rows in the
//            order of the ranks, then the bias.
//
// Few pairs. For an owner with few pairs, ll_combine_few.cuh replaces all of these steps except the header.
//
// Buffers. Words, flags and slots are in the block of the rank that reads them. Shared memory has the lists of a batch.
//
// Memory order. See low_latency.cuh.
//
// Co-residency. The send half sends weights and waits for the weights of peers. So the kernel is launched
// cooperatively, unless it only receives.
//
// After a fault. Nothing is signalled. The output is filled with 0xFF bytes.
#include "cuda/moe/kernels.h"
#include "cuda/moe/ll_combine_recv.cuh"
#include "cuda/moe/ll_combine_send.cuh"

namespace ep::cuda {

namespace {

constexpr int kMostWorkers = 19;  // with more, a thread has too few registers
constexpr int kMaxThreads = (kMostWorkers + 1) * kWarp;

// False after a fault. kAlwaysFew: see ll_always_few_pairs.
template <class Element, bool kAlwaysFew>
__device__ bool send(const LlRun& ll, const LlCombineArgs& args, int32_t* written) {
  __shared__ LlLists lists;
  if (warp_id() == num_workers()) {
    if (!kAlwaysFew) signal_partials(ll, args, written);
    return true;
  }
  send_weights(ll, args);
  if (blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(ll.run);
  __syncwarp();
  const bool sent = send_pairs(ll, args);
  LlHolder<Element> holder(ll, args, lists, reinterpret_cast<LlTerm*>(dynamic_shared));
  return (kAlwaysFew ? holder.open() : holder.run(written)) && sent;
}

// Workers. False after a fault.
template <class Element, bool kAlwaysFew>
__device__ bool receive(const LlRun& ll, const LlCombineArgs& args) {
  if (blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(ll.run);
  __syncwarp();
  const LlHeader& header = args.op.header;
  if (kAlwaysFew || ll_has_few_pairs(args.op, header.num_tokens)) return LlFewOwner<Element>(ll, args).run();
  return LlOwner<Element>(ll, args).run();
}

// Profilers show one kernel for both halves, with "::combine" in its name (see ll_dispatch.cu).
namespace combine {

template <class Element, bool kAlwaysFew>
__global__ void __launch_bounds__(kMaxThreads, 1)
    ep_ll_combine(const __grid_constant__ LlCombineArgs args, const __grid_constant__ LlLayout lay) {
  __shared__ LlPeers peers;
  __shared__ int32_t written;  // counts the batches that worker warps have written
  const bool sends = (args.op.phases & kLlSend) != 0, receives = (args.op.phases & kLlReceive) != 0;
  if (threadIdx.x == 0) written = 0;
  LlRun ll = ll_half(args.op, lay, kLlCombine, sends ? kLlSend : kLlReceive, ll_epoch(args.op, kLlCombine), peers);
  const bool works = warp_id() < num_workers();
  bool ok = ll_enter(ll, peers);
  if (ok && sends && !works) ll_begin_send(ll);
  if (ok && sends) ok = send<Element, kAlwaysFew>(ll, args, &written);
  if (ok && receives && works)
    ok = receive<Element, kAlwaysFew>(ll_half(args.op, lay, kLlCombine, kLlReceive, ll.run.epoch, peers), args);
  if (!ll_leave(ll, ok) && receives)
    fill_bytes(args.out, int64_t{args.op.header.num_tokens} * args.op.header.row_bytes, 0xFF, threadIdx.x, blockDim.x);
}

}  // namespace combine

template <class Element, bool kAlwaysFew>
void launch_kernel(const LlCombineArgs& args) {
  constexpr auto kKernel = combine::ep_ll_combine<Element, kAlwaysFew>;
  const LlOperation& op = args.op;
  const int64_t limit = limits_of<kKernel>().shared_bytes;
  const int64_t bytes =
      (op.phases & kLlSend) == 0 ? 0 : int64_t{kLlMostInBatch} * op.header.topk * static_cast<int64_t>(sizeof(LlTerm));
  require(bytes <= limit, "topk", "as much as shared memory has room for", op.header.topk);
  const int threads = ll_threads(op, ceil_div(op.header.row_bytes, 16 * kWarp), kMostWorkers);
  const LlLayout lay = ll_layout(op.comm.num_ranks, op.shape);
  const auto launch_it = (op.phases & kLlSend) != 0 ? launch_cooperatively<kKernel, LlCombineArgs, LlLayout>
                                                    : launch<kKernel, LlCombineArgs, LlLayout>;
  launch_it("low-latency combine", op.num_sms, threads, bytes, op.stream, args, lay);
}

template <class Element>
void launch_element(const LlCombineArgs& args) {
  return ll_always_few_pairs(args.op) ? launch_kernel<Element, true>(args) : launch_kernel<Element, false>(args);
}

void require_ll_combine(const LlCombineArgs& args) {
  const LlOperation& op = args.op;
  const LlHeader& header = op.header;
  const bool coded = header.format == kLlLogfmt;
  require_ll(op, coded ? ll_logfmt_bytes(args.hidden) : header.row_bytes);
  require(coded || header.format == kLlPlain, "format", "0 or 4", header.format);
  require(!coded || args.element == kBFloat16, "element in logfmt", "bfloat16", args.element);
  require(!coded || args.hidden % kLlLogfmtGroup == 0, "hidden in logfmt", "a multiple of 128", args.hidden);
  require(header.weight_bytes == 4, "weight_bytes", "4 on CUDA", header.weight_bytes);
  require(header.row_bytes == args.hidden * (args.element == kFloat32 ? 4 : 2), "row_bytes", "hidden elements",
          header.row_bytes);
  require(args.id_bytes == 4 || args.id_bytes == 8, "id_bytes", "4 or 8", args.id_bytes);
  if ((op.phases & kLlSend) != 0) require_rows("y", args.y);
  if ((op.phases & kLlReceive) == 0) return;
  require_rows("out", args.out);
  require_rows("bias", args.bias);
}

}  // namespace

void ll_combine(const LlCombineArgs& args) {
  if (args.element != kFloat32 && args.element != kBFloat16 && args.element != kFloat16)
    throw std::invalid_argument("element: expected float32, bfloat16 or float16 on CUDA, got code " +
                                std::to_string(args.element));
  require_ll_combine(args);
  switch (args.element) {
    case kFloat32:
      return launch_element<Float32>(args);
    case kBFloat16:
      return launch_element<BFloat16>(args);
    default:
      return launch_element<Float16>(args);
  }
}

}  // namespace ep::cuda
