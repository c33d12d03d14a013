// CUDA: kernels, host memory, streams, and the kernels of common/wire.h. All bindings that only builds with CUDA have
// are in this file, so builds without CUDA can take the objects of the other bindings.
#if defined(EP_WITH_CUDA)
#include "bindings/bind.h"
#include "common/collectives.h"
#include "common/wire.h"
#include "control/gpu_messages.h"
#include "cuda/core/host.h"

namespace ep::bindings {

void bind_cuda(py::module_& m) {
  control::cuda_calls() = {&stream_capture, &order_streams, &copy_on_stream};
  control::message_calls() = {&cuda::load_message_kernels,
                              &cuda::send_message,
                              &cuda::receive_message,
                              &make_stream,
                              &drop_stream,
                              &mark_stream,
                              &drop_mark,
                              &is_over,
                              &order_after,
                              &wait_on_host,
                              &fill,
                              &order_streams,
                              &write_word};
  bind_table(m, "cuda", cuda_kernels());
  static const CollectiveKernels collectives{&cuda::all_gather, &cuda::reduce_scatter, &cuda::small_exchange};
  m.attr("cuda").attr("collectives") = reinterpret_cast<Address>(&collectives);
  EP_STRUCT(m, WireArgs, kind, num_sms, keep, seed, chunk_bytes, bytes, failed, stream)
      .def("set_pairs", [](WireArgs& args, const std::vector<Address>& from, const std::vector<Address>& to) {
        if (from.size() != to.size()) throw py::value_error("pairs: expected as many sources as destinations");
        set_words(args.from, from);
        set_words(args.to, to);
        args.num_pairs = static_cast<int32_t>(from.size());
      });
  EP_STRUCT(m, HoldArgs, nanoseconds, num_sms, stop, stream);
  m.attr("cuda_archs") = built_archs();
  m.attr("cuda_version") = built_cuda();
  m.def("wire", &wire, py::call_guard<py::gil_scoped_release>());
  m.def("hold", &hold, py::call_guard<py::gil_scoped_release>());
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("order_streams", &order_streams, py::call_guard<py::gil_scoped_release>());
  m.def("stream_capture", &stream_capture);
}

}  // namespace ep::bindings
#endif
