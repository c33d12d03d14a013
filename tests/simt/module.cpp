// The kernels of ep_plugin/csrc/cuda as this module's functions, with the arguments of ep_plugin._C, which is imported
// before it: tensors on CPUs, and streams that are numbers.
#include <pybind11/pybind11.h>

#include "api.h"
#include "collectives.h"
#include "simt.h"

namespace py = pybind11;

namespace simt {
void run_wrong(const std::string& name, uint64_t memory);  // wrong.cpp
}

namespace {

template <class... Args>
void bind(py::module_& m, const char* name, void (*kernel)(const Args&...)) {
  m.def(name, kernel, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_simt, m) {
  const ep::KernelTable& table = ep::cuda_kernels();
  bind(m, "plan", table.plan);
  bind(m, "notify", table.notify);
  bind(m, "send", table.send);
  bind(m, "admit", table.admit);
  bind(m, "expand", table.expand);
  bind(m, "push", table.push);
  bind(m, "add", table.add);
  bind(m, "send_and_expand", table.send_and_expand);
  bind(m, "push_and_add", table.push_and_add);
  bind(m, "weigh_back", table.weigh_back);
  bind(m, "push_shard", &ep::cuda::push_shard);
  bind(m, "small_shards", &ep::cuda::small_shards);
  bind(m, "sum_shards", &ep::cuda::sum_shards);
  m.def("run_wrong", &simt::run_wrong, py::call_guard<py::gil_scoped_release>());
  m.def("synchronize", &simt::synchronize, py::call_guard<py::gil_scoped_release>());
}
