// The kernel table of CUDA.
#include "cuda/moe/kernels.h"

namespace ep {

const KernelTable& cuda_kernels() {
  static const KernelTable table{cuda::plan,
                                 cuda::positions,
                                 cuda::notify,
                                 cuda::place,
                                 cuda::dispatch_send,
                                 cuda::dispatch_recv,
                                 cuda::combine_send,
                                 cuda::combine_recv,
                                 cuda::dispatch,
                                 cuda::combine,
                                 cuda::weight_grad,
                                 cuda::quantize,
                                 cuda::pack,
                                 cuda::combine_add,
                                 cuda::add_counts,
                                 cuda::layout,
                                 cuda::ll_dispatch,
                                 cuda::ll_combine,
                                 false};
  return table;
}

}  // namespace ep
