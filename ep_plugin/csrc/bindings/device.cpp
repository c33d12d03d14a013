// CUDA: kernels, host memory, streams, and the kernels of common/wire.h. All bindings that only builds with CUDA have
// are in this file, so builds without CUDA can take the objects of the other bindings.
#if defined(EP_WITH_CUDA)
#include "bindings/bind.h"
#include "common/collectives.h"
#include "common/send_receive.h"
#include "common/wire.h"
#include "control/engine.h"
#include "cuda/core/host.h"

namespace ep::bindings {

void bind_cuda(py::module_& m) {
  control::cuda_calls() = {&stream_capture, &order_streams, &copy_on_stream};
  bind_table(m, "cuda", cuda_kernels());
  py::module_ kernels = m.attr("cuda");
  static const CollectiveKernels collectives{&cuda::all_gather, &cuda::reduce_scatter, &cuda::small_exchange};
  kernels.attr("collectives") = reinterpret_cast<Address>(&collectives);
  bind_kernel(kernels, "send_message", &cuda::send_message);
  bind_kernel(kernels, "receive_message", &cuda::receive_message);
  kernels.def("load_message_kernels", &cuda::load_message_kernels, py::call_guard<py::gil_scoped_release>());
  Struct<WireArgs>(m, "WireArgs")
      .field("kind", &WireArgs::kind)
      .field("num_sms", &WireArgs::num_sms)
      .field("keep", &WireArgs::keep)
      .field("seed", &WireArgs::seed)
      .field("chunk_bytes", &WireArgs::chunk_bytes)
      .field("bytes", &WireArgs::bytes)
      .field("failed", &WireArgs::failed)
      .field("stream", &WireArgs::stream)
      .def("set_pairs", [](WireArgs& args, const std::vector<Address>& from, const std::vector<Address>& to) {
        if (from.size() != to.size()) throw py::value_error("pairs: expected as many sources as destinations");
        set_words(args.from, from);
        set_words(args.to, to);
        args.num_pairs = static_cast<int32_t>(from.size());
      });
  Struct<HoldArgs>(m, "HoldArgs")
      .field("nanoseconds", &HoldArgs::nanoseconds)
      .field("num_sms", &HoldArgs::num_sms)
      .field("stop", &HoldArgs::stop)
      .field("stream", &HoldArgs::stream);
  m.attr("cuda_archs") = built_archs();
  m.attr("cuda_version") = built_cuda();
  m.def("wire", &wire, py::call_guard<py::gil_scoped_release>());
  m.def("hold", &hold, py::call_guard<py::gil_scoped_release>());
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("order_streams", &order_streams, py::call_guard<py::gil_scoped_release>());
  m.def("make_stream", &make_stream);
  m.def("drop_stream", &drop_stream);
  m.def("stream_capture", &stream_capture);
}

}  // namespace ep::bindings
#endif
