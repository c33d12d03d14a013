#include "kernels.h"

namespace ep {

const KernelTable& cpu_kernels() {
  static const KernelTable table{cpu::plan,         cpu::notify,    cpu::send, cpu::admit,
                                 cpu::expand,       cpu::push,      cpu::add,  cpu::send_and_expand,
                                 cpu::push_and_add, cpu::weigh_back};
  return table;
}

}  // namespace ep
