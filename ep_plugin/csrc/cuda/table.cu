// The table itself, and the one-CTA kernel by which readers are let in after their sender.
#include "kernels.h"
#include "launch.cuh"
#include "sync.cuh"

namespace ep {

namespace cuda {

namespace {
__global__ void wait_started_kernel(const __grid_constant__ Comm comm, Step step, Pool pool) {
  const Run run = enter(comm, step);
  if (run.ok) wait_at_least(run, &state_of(comm).started[pool], run.epoch, comm.rank);
}
}  // namespace

void wait_started(const Comm& comm, Step step, Address stream) {
  launch<wait_started_kernel>("wait_started", 1, 1, 0, stream, comm, step,
                              step == kExpand ? kDispatchPool : kCombinePool);
}

}  // namespace cuda

const KernelTable& cuda_kernels() {
  static const KernelTable table{cuda::plan, cuda::notify, cuda::send, cuda::expand, cuda::push, cuda::add};
  return table;
}

}  // namespace ep
