// The table itself, and the one-CTA kernel by which readers are let in after their sender.
#include "kernels.h"
#include "launch.cuh"
#include "sync.cuh"

namespace ep {

namespace cuda {

namespace {
__global__ void admit_kernel(const __grid_constant__ AdmitArgs args, Pool pool) {
  const Run run = enter(args.comm, static_cast<Step>(args.step));
  const State& state = state_of(args.comm);
  if (run.ok && wait_at_least(run, &state.started[pool], run.epoch, args.comm.rank, kOwnKernel) && args.fresh)
    wait_at_least(run, &state.laid_out, run.epoch, args.comm.rank, kOwnKernel);
  ptx::let_next_kernel_in();
}
}  // namespace

void admit(const AdmitArgs& args) {
  require_comm(args.comm);
  require(args.step == kExpand || args.step == kAdd, "step", "expand or add", args.step);
  const Pool pool = args.step == kExpand ? kDispatchPool : kCombinePool;
  launch<admit_kernel>("admit", 1, 1, 0, args.stream, args, pool);
}

}  // namespace cuda

const KernelTable& cuda_kernels() {
  static const KernelTable table{cuda::plan,         cuda::notify,    cuda::send, cuda::admit,
                                 cuda::expand,       cuda::push,      cuda::add,  cuda::send_and_expand,
                                 cuda::push_and_add, cuda::weigh_back};
  return table;
}

}  // namespace ep
