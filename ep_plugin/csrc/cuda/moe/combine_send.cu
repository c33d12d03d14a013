// Combine send: reduces the expert rows of each received slot to one partial row, and stores it in the combine pool of
// the token's owner.
//
// Roles. Sending warps share the slots (rows.cuh): chunk by chunk of the owners' tokens, all owners in turn, starting
// with the next rank, so that no two ranks write to one owner at the same time. Expert rows come through shared memory
// (bulk) or registers. Lanes store the sums, and after them the values that return to the owner. The last warp of each
// CTA signals chunks (signals.cuh).
// Latency. Finding the next row, its terms, and their weights takes three loads that depend on each other. They take as
// long as half a row. On the bulk path these loads run while rows are summed.
// Waits. A combine send waits only for consumed words, never for rows. When all its CTAs run, it lets the receive
// start, which then cannot take their SMs and wait there for peers.
// Buffers. A slot of the combine pool is [row | extra[K]], see PartialLayout.
// Memory order. The lanes of a warp join after their stores and before the warp publishes its progress. signals.cuh
// describes the order that owners see.
#include "cuda/moe/combine_send.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kSendWarps = kReduceWarps - 1;

template <class Element, bool kBulk>
__global__ void __launch_bounds__(kReduceWarps* kWarp, 1)
    ep_combine_send(const __grid_constant__ CombineSendArgs args, const __grid_constant__ Cut cut) {
  __shared__ Progress progress;
  Run run = enter(args.comm, kCombineSend);
  const Meta meta = meta_of(args.comm, args.routing);
  const SendOrder order(args.comm);
  progress.clear();
  if (run.ok) {
    const bool may_write = destinations_have_read(run, kCombinePool), fits = partials_fit(run, args, meta);
    order.make(meta, partial_layout_of(args.header).bytes);
    run.ok = may_send(may_write && fits);
  }
  if (run.ok) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && order.chunks() == 0) hold_at_gate(run);
    if (warp_id() == cut.warps) {
      ptx::launch_dependents();  // the receive, once all CTAs of this kernel run
      open_destinations(run, kCombinePool, args.header);
      signal_chunks(run, kCombinePool, progress, cut.warps, PartialChunks{run, meta, order, cut.parts});
    } else {
      CombineSendJob job(run, args, order, cut, cut.warps, progress);
      ReduceRing<kBulk> ring(cut);
      reduce_rows<Element>(job, run, cut, ring);
    }
  }
  if (last_to_finish(run) && !faulted(args.comm)) finish_sending(run, kCombinePool);
}

template <class Element>
void launch_combine_send(const CombineSendArgs& args) {
  const KernelLimits limits = limits_of<ep_combine_send<Element, true>>();
  const bool bulk = limits.bulk && args.comm.plain == 0;
  const int64_t order_bytes = SendOrder::shared_bytes(args.comm.num_ranks);
  Cut cut = cut_for_sums(args.header.row_bytes, args.routing.num_tokens, kSendWarps, 2 * args.routing.topk,
                         limits.shared_bytes - order_bytes, bulk);
  cut.shared_begin = order_bytes;
  const int threads = kReduceWarps * kWarp;
  const int64_t shared_bytes = order_bytes + cut.shared_bytes();
  if (bulk)
    launch<ep_combine_send<Element, true>>("combine_send", args.num_sms, threads, shared_bytes, args.stream, args, cut);
  else
    launch<ep_combine_send<Element, false>>("combine_send", args.num_sms, threads, shared_bytes, args.stream, args,
                                            cut);
}

}  // namespace

void combine_send(const CombineSendArgs& args) {
  require_combine_send(args);
  switch (args.element) {
    case kFloat32:
      return launch_combine_send<Float32>(args);
    case kBFloat16:
      return launch_combine_send<BFloat16>(args);
    case kFloat16:
      return launch_combine_send<Float16>(args);
  }
  throw std::invalid_argument("element: expected float32, bfloat16 or float16 on CUDA, got code " +
                              std::to_string(args.element));
}

}  // namespace ep::cuda
