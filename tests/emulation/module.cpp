// The module _simt: the kernels of ep_plugin/csrc/cuda as functions. They take the argument structs of ep_plugin._C,
// which must be imported first. Addresses are of CPU memory, and streams are numbers.
#include <pybind11/pybind11.h>

#include "common/api.h"
#include "common/collectives.h"
#include "common/low_latency_args.h"
#include "common/send_receive.h"
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
  m.attr("table") = reinterpret_cast<uint64_t>(&table);
  m.attr("low_latency_over_nodes") = table.low_latency_over_nodes;
  bind(m, "plan", table.plan);
  bind(m, "positions", table.positions);
  bind(m, "notify", table.notify);
  bind(m, "place", table.place);
  bind(m, "dispatch_send", table.dispatch_send);
  bind(m, "dispatch_recv", table.dispatch_recv);
  bind(m, "combine_send", table.combine_send);
  bind(m, "combine_recv", table.combine_recv);
  bind(m, "dispatch", table.dispatch);
  bind(m, "combine", table.combine);
  bind(m, "weight_grad", table.weight_grad);
  bind(m, "quantize", table.quantize);
  bind(m, "pack", table.pack);
  bind(m, "combine_add", table.combine_add);
  bind(m, "add_counts", table.add_counts);
  bind(m, "layout", table.layout);
  static const ep::CollectiveKernels collectives{&ep::cuda::all_gather, &ep::cuda::reduce_scatter,
                                                 &ep::cuda::small_exchange};
  m.attr("collectives") = reinterpret_cast<uint64_t>(&collectives);
  bind(m, "send_message", &ep::cuda::send_message);
  bind(m, "receive_message", &ep::cuda::receive_message);
  m.def("load_message_kernels", &ep::cuda::load_message_kernels);
  m.def("run_wrong", &simt::run_wrong, py::call_guard<py::gil_scoped_release>());
  m.def("synchronize", &simt::synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("limit_sms", &simt::limit_sms);
  m.def("order", &simt::order);
  m.def("shut", &simt::shut);
  m.def("open", &simt::open);
  m.def("resident", &simt::resident);
  m.def("enqueued", &simt::enqueued);
  m.def("ended", &simt::ended);
}
