// The kernel table of CPUs.
#include "cpu/moe/kernels.h"

namespace ep {

const KernelTable& cpu_kernels() {
  static const KernelTable table{cpu::plan,
                                 cpu::positions,
                                 cpu::notify,
                                 cpu::place,
                                 cpu::dispatch_send,
                                 cpu::dispatch_recv,
                                 cpu::combine_send,
                                 cpu::combine_recv,
                                 cpu::dispatch,
                                 cpu::combine,
                                 cpu::weight_grad,
                                 cpu::quantize,
                                 cpu::pack,
                                 cpu::combine_add,
                                 cpu::add_counts,
                                 cpu::layout,
                                 cpu::ll_dispatch,
                                 cpu::ll_combine,
                                 true};
  return table;
}

}  // namespace ep
