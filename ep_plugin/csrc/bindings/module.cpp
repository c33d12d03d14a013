// The module ep_plugin._C: argument structs, one function per kernel and device, and boards. _C.pyi lists its names.
#include <sys/syscall.h>
#include <unistd.h>

#include "bindings/bind.h"
#include "common/board.h"

namespace py = pybind11;
using namespace ep;

namespace {

// Whether a signal handler has raised an exception, as for Ctrl-C. The exception stays set for the caller of the wait.
// Python handles signals only on its main thread, so other threads need not take the interpreter's lock.
bool signal_has_raised() {
  if (syscall(SYS_gettid) != getpid()) return false;
  py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Kernels of ep_plugin: pointers and streams are integers.";
  set_interruption(&signal_has_raised);
  bindings::bind_kernels(m);
  bindings::bind_board(m);
  bindings::bind_collectives(m);
  bindings::bind_low_latency(m);
  bindings::bind_messages(m);
  bindings::bind_control(m);
  bindings::bind_high_throughput(m);
#if defined(EP_WITH_CUDA)
  bindings::bind_cuda(m);
#endif
}
