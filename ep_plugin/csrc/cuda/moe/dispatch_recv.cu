// Dispatch receive: copies received slots to output rows as their chunks arrive.
//
// Roles. The last warp of each CTA waits for every source's opening. All warps clear the output rows for which nothing
// is sent. CTA 0 writes the tables of counts and offsets. Then warps take slots in turn: lane 0 moves the row (bulk:
// one load of the slot, one store for each FLAT row), and all lanes read its head. The last CTA checks that the chunks
// cover every source's rows, and signals to the sources that their rows have been read.
// Memory order. The warp acquires a chunk's arrival at system scope, joins, and fences the async proxy before bulk
// loads. Consumed words are signalled with release order, after the reads of all CTAs.
// After a fault. All outputs are filled with 0xFF bytes. The tables of counts and offsets are zeros: no rows.
#include "cuda/moe/dispatch_recv.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

// All threads.
template <bool kBulk>
__device__ __forceinline__ void receive_all(const DispatchRecvArgs& args, const Cut& cut) {
  Run run = enter(args.comm, kDispatchRecv);
  const Meta meta = meta_of(args.comm, args.routing);
  run.ok = __syncthreads_and(run.ok && (warp_id() > 0 || has_counts(run, args.header))) != 0;
  if (run.ok && args.optimistic != 0 && must_relaunch(args, meta)) return;
  if (run.ok) run.ok = __syncthreads_and(slots_fit(run, args)) != 0;
  if (run.ok) {
    const Output out(run, args);
    const bool opened = open_sources(run, kDispatchPool, args.header, meta.src_tokens);
    clear_padding(out, team_of_warps());
    if (blockIdx.x == 0) write_tables(out, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
    if (__syncthreads_and(opened)) {
      if (blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(run);
      DispatchRecvJob job(out, cut, false);
      copy_rows<kBulk>(job, run, cut);
    }
  }
  if (last_to_finish(run)) finish_dispatch_recv(run, args, meta);
}

template <bool kBulk>
__global__ void __launch_bounds__(kCopyWarps* kWarp, 1)
    ep_dispatch_recv(const __grid_constant__ DispatchRecvArgs args, const __grid_constant__ Cut cut) {
  receive_all<kBulk>(args, cut);
  if (blockIdx.x == 0) ptx::wait_on_dependency();  // so that the next kernel in the stream runs after the send
}

template <bool kBulk>
void launch_dispatch_recv(const DispatchRecvArgs& args, const Cut& cut) {
  constexpr auto kKernel = ep_dispatch_recv<kBulk>;
  const auto launch_it =
      args.in_order == 0 ? launch_early<kKernel, DispatchRecvArgs, Cut> : launch<kKernel, DispatchRecvArgs, Cut>;
  launch_it("dispatch_recv", args.num_sms, cut.warps * kWarp, cut.shared_bytes(), args.stream, args, cut);
}

}  // namespace

void dispatch_recv(const DispatchRecvArgs& args) {
  require_dispatch_recv(args);
  const KernelLimits limits = limits_of<ep_dispatch_recv<true>>();
  const int list = RowWriter::list_size(args.routing);
  const SlotLayout lay = slot_layout_of(args.header);
  const Cut cut =
      args.routing.num_tokens <= kTokensInParts
          ? cut_in_parts(lay.image, lay.row, kCopyWarps, DispatchRecvJob::kStages, list, limits.shared_bytes)
          : cut_for_warps(lay.image, kMinCopyWarps, kCopyWarps, DispatchRecvJob::kStages, list, limits.shared_bytes);
  if (limits.bulk && args.comm.plain == 0 && cut.warps >= 1 && lay.row < cut.piece_bytes)
    launch_dispatch_recv<true>(args, cut);
  else
    launch_dispatch_recv<false>(args, uncut(lay.image, kCopyWarps, list));
}

}  // namespace ep::cuda
