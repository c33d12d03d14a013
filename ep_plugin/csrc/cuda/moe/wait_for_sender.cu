// ep_wait_for_sender: one thread that delays a stream until all CTAs of this rank's sender run. Without it, a receiving
// kernel could take all SMs, wait there for peers, and keep this rank's sender out.
#include "cuda/core/launch.cuh"
#include "cuda/core/peer.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {
__global__ void ep_wait_for_sender(const __grid_constant__ WaitForSenderArgs args, Pool pool) {
  const Run run = enter(args.comm, static_cast<Step>(args.step));
  const State& state = state_of(args.comm);
  if (run.ok && peer::wait_at_least(run, &state.started[pool], run.epoch, args.comm.rank, kOwnKernel) && args.fresh)
    peer::wait_at_least(run, &state.counts_ready, run.epoch, args.comm.rank, kOwnKernel);
  ptx::launch_dependents();
}
}  // namespace

void wait_for_sender(const WaitForSenderArgs& args) {
  require_comm(args.comm);
  require(args.step == kDispatchRecv || args.step == kCombineRecv, "step", "dispatch receive or combine receive",
          args.step);
  const Pool pool = args.step == kDispatchRecv ? kDispatchPool : kCombinePool;
  launch<ep_wait_for_sender>("wait_for_sender", 1, 1, 0, args.stream, args, pool);
}

}  // namespace ep::cuda
