// Combine receive: adds the partial rows of a token to the bias, in the order of the ranks that sent them.
//
// Roles. Warps share the tokens (rows.cuh). A token's chunk must have arrived from every rank. The last CTA signals to
// the ranks that their rows have been read. The send ahead of it in the stream lets it start (launch_early).
// Memory order. The warp acquires a chunk's arrivals at system scope, joins, and fences the async proxy before bulk
// loads. Consumed words are signalled with release order, after the reads of all CTAs.
// After a fault. All outputs are filled with 0xFF bytes.
#include "cuda/moe/combine_recv.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

template <class Element, bool kBulk>
__global__ void __launch_bounds__(kReduceWarps* kWarp, 1)
    ep_combine_recv(const __grid_constant__ CombineRecvArgs args, const __grid_constant__ Cut cut) {
  __shared__ int32_t bases[kMaxRanks];
  const Run run = enter(args.comm, kCombineRecv);
  if (run.ok && partials_fit(run, args, bases) &&
      __syncthreads_and(open_sources(run, kCombinePool, args.header, nullptr))) {
    CombineRecvJob job(run, args, cut, bases,
                       NextRow(run, kCombineRecvRows, parts_to_receive(args, cut), 0, cut.warps));
    ReduceRing<kBulk> ring(cut);
    reduce_rows<Element>(job, run, cut, ring);
  }
  if (last_to_finish(run)) finish_combine_recv(run, args);
  if (blockIdx.x == 0) ptx::wait_on_dependency();  // so that the next kernel in the stream runs after the send
}

template <class Element, bool kBulk>
void launch_kernel(const CombineRecvArgs& args, const Cut& cut) {
  constexpr auto kKernel = ep_combine_recv<Element, kBulk>;
  const auto launch_it =
      args.in_order == 0 ? launch_early<kKernel, CombineRecvArgs, Cut> : launch<kKernel, CombineRecvArgs, Cut>;
  launch_it("combine_recv", args.num_sms, kReduceWarps * kWarp, cut.shared_bytes(), args.stream, args, cut);
}

template <class Element>
void launch_combine_recv(const CombineRecvArgs& args) {
  const KernelLimits limits = limits_of<ep_combine_recv<Element, true>>();
  const bool bulk = limits.bulk && args.comm.plain == 0;
  const Cut cut = cut_for_sums(args.header.row_bytes, args.routing.num_tokens, kReduceWarps, 2 * args.comm.num_ranks,
                               limits.shared_bytes, bulk);
  return bulk ? launch_kernel<Element, true>(args, cut) : launch_kernel<Element, false>(args, cut);
}

}  // namespace

void combine_recv(const CombineRecvArgs& args) {
  require_combine_recv(args);
  switch (args.element) {
    case kFloat32:
      return launch_combine_recv<Float32>(args);
    case kBFloat16:
      return launch_combine_recv<BFloat16>(args);
    case kFloat16:
      return launch_combine_recv<Float16>(args);
  }
  throw std::invalid_argument("element: expected float32, bfloat16 or float16 on CUDA, got code " +
                              std::to_string(args.element));
}

}  // namespace ep::cuda
