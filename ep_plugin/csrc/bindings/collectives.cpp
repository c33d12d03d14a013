// All-gather and reduce-scatter: argument structs, kernels, and the words by which hosts agree (blocks, calls).
#include <unistd.h>

#include "bindings/bind.h"
#include "common/board.h"
#include "common/collectives.h"
#include "common/tensor.h"
#include "common/views.h"

namespace ep::bindings {

namespace {

void bind_cpu_collectives(py::module_& m) {
  m.attr("collective_control_bytes") = sizeof(CollectiveControl);
  m.attr("max_blocks") = kMaxPeerBlocks;
  m.attr("requests_bytes") = sizeof(Requests);
  m.attr("call_ring_bytes") = sizeof(CallRow) * kCalls;
  bind_enum(m, "CollectiveOp", {{"ALL_GATHER", kOpAllGather}, {"REDUCE_SCATTER", kOpReduceScatter}});
  m.attr("piece_fields") = py::make_tuple("op", "bytes", "element");
  Struct<Piece>(m, "Piece")
      .field("bytes", &Piece::bytes)
      .field("block", &Piece::block)
      .field("num_blocks", &Piece::num_blocks)
      .field("blocks", &Piece::blocks)
      .field("block_bytes", &Piece::block_bytes)
      .def("set_offset", array_of(&Piece::offset));
  Struct<CpuAllGatherArgs>(m, "CpuAllGatherArgs")
      .field("comm", &CpuAllGatherArgs::comm)
      .field("piece", &CpuAllGatherArgs::piece)
      .field("input", &CpuAllGatherArgs::input)
      .def("set_outputs", array_of(&CpuAllGatherArgs::outputs));
  Struct<CpuReduceScatterArgs>(m, "CpuReduceScatterArgs")
      .field("comm", &CpuReduceScatterArgs::comm)
      .field("piece", &CpuReduceScatterArgs::piece)
      .field("output", &CpuReduceScatterArgs::output)
      .field("scale", &CpuReduceScatterArgs::scale)
      .field("element", &CpuReduceScatterArgs::element)
      .def("set_inputs", array_of(&CpuReduceScatterArgs::inputs));
  py::module_ cpu = m.attr("cpu");
  bind_kernel(cpu, "all_gather", &cpu::all_gather);
  bind_kernel(cpu, "reduce_scatter", &cpu::reduce_scatter);
}

void bind_cuda_collectives(py::module_& m) {
  m.attr("device_control_bytes") = sizeof(DeviceControl);
  m.attr("staging_block") = kStagingBlock;
  m.attr("max_ctas") = kMaxCtas;
  m.attr("max_channels") = kMaxChannels;
  Struct<AllGatherArgs>(m, "AllGatherArgs")
      .field("comm", &AllGatherArgs::comm)
      .field("input", &AllGatherArgs::input)
      .field("bytes", &AllGatherArgs::bytes)
      .field("blocks", &AllGatherArgs::blocks)
      .field("host_blocks", &AllGatherArgs::host_blocks)
      .field("offset", &AllGatherArgs::offset)
      .field("staging", &AllGatherArgs::staging)
      .field("place", &AllGatherArgs::place)
      .field("block", &AllGatherArgs::block)
      .field("num_ctas", &AllGatherArgs::num_ctas)
      .field("captured", &AllGatherArgs::captured)
      .field("number", &AllGatherArgs::number)
      .field("stream_words", &AllGatherArgs::stream_words)
      .field("begun", &AllGatherArgs::begun)
      .field("finished", &AllGatherArgs::finished)
      .field("stream", &AllGatherArgs::stream)
      .def("set_outputs", array_of(&AllGatherArgs::outputs));
  m.def("channel_cells_bytes", &channel_cells_bytes);
  Struct<ReduceScatterArgs>(m, "ReduceScatterArgs")
      .field("comm", &ReduceScatterArgs::comm)
      .field("output", &ReduceScatterArgs::output)
      .field("bytes", &ReduceScatterArgs::bytes)
      .field("scale", &ReduceScatterArgs::scale)
      .field("element", &ReduceScatterArgs::element)
      .field("num_ctas", &ReduceScatterArgs::num_ctas)
      .field("stream", &ReduceScatterArgs::stream)
      .field("cells", &ReduceScatterArgs::cells)
      .field("own_cells", &ReduceScatterArgs::own_cells)
      .def("set_inputs", array_of(&ReduceScatterArgs::inputs));
  m.attr("small_bytes") = kSmallBytes;
  m.def("small_words_bytes", &small_words_bytes);
  Struct<SmallExchangeArgs>(m, "SmallExchangeArgs")
      .field("comm", &SmallExchangeArgs::comm)
      .field("bytes", &SmallExchangeArgs::bytes)
      .field("scale", &SmallExchangeArgs::scale)
      .field("element", &SmallExchangeArgs::element)
      .field("num_ctas", &SmallExchangeArgs::num_ctas)
      .field("stream", &SmallExchangeArgs::stream)
      .field("words", &SmallExchangeArgs::words)
      .field("own_words", &SmallExchangeArgs::own_words)
      .field("own", &SmallExchangeArgs::own)
      .def("set_shards", array_of(&SmallExchangeArgs::shards));
  m.def("dlpack_bytes", &dlpack_bytes);
  m.def("place_word", &place_word);
  m.attr("stream_words_shape") = py::make_tuple(2, kMaxPeerBlocks + 1, kMaxRanks);  // ready and done
  m.attr("stream_words_bytes") = sizeof(StreamWords);
}

// Requests for blocks, and calls.
void bind_host_agreement(py::module_& m) {
  m.attr("fault_offset") = offsetof(State, fault);
  m.def("fault_board", &fault_board);
  m.def("post_request", &post_request);
  m.def("release_block", &release_block);
  // release_block() as the callback of a weak reference, which passes itself. Python cannot interrupt it halfway. A
  // forked child does nothing.
  m.def("release_dead_block", [](Address requests, int block, uint64_t uses, int process, const py::object&) {
    if (getpid() == process) release_block(requests, block, uses);
  });
  m.def("read_request", [](Address requests, uint64_t number) {
    const Request& row = at<Requests>(requests)->rows[number % kRequests];
    return py::make_tuple(row.bytes, row.free);
  });
  // Asks the ranks with these requests. Returns (whether the block was free on all of them, the first rank that did not
  // answer in time or -1).
  m.def("were_free", [](const std::vector<Address>& requests, int block, uint64_t uses, uint64_t number, Address board,
                        int64_t timeout_ns) {
    bool free = true;
    int late = -1;
    {
      py::gil_scoped_release release;
      for (size_t rank = 0; rank < requests.size() && free && late < 0; ++rank)
        if (was_free(requests[rank], block, uses, number, board, timeout_ns, &free) != kReady)
          late = static_cast<int>(rank);
    }
    raise_interruption();
    return py::make_tuple(free, late);
  });
  // Returns None, or the difference of a peer's call: (peer, field, mine, theirs).
  m.def("post_call",
        [](Address rings, int num_ranks, int rank, uint64_t number, int64_t bytes, int64_t element,
           int64_t place) -> py::object {
          CallDifference found;
          if (!post_call(rings, num_ranks, rank, number, {bytes, element, place}, &found)) return py::none();
          return py::make_tuple(found.peer, found.field, found.mine, found.theirs);
        });
  // Returns the first of the ranks with these requests that has not posted request `number` in time, or -1.
  m.def("wait_requests", [](const std::vector<Address>& requests, uint64_t number, Address board, int64_t timeout_ns) {
    int late = -1;
    {
      py::gil_scoped_release release;
      for (size_t rank = 0; rank < requests.size() && late < 0; ++rank) {
        const uint64_t* posted = &at<Requests>(requests[rank])->rows[number % kRequests].number;
        const auto there = [=] { return __atomic_load_n(posted, __ATOMIC_ACQUIRE) == number; };
        if (wait_until(there, board, timeout_ns) != kReady) late = static_cast<int>(rank);
      }
    }
    raise_interruption();
    return late;
  });
}

}  // namespace

void bind_collectives(py::module_& m) {
  bind_cpu_collectives(m);
  bind_cuda_collectives(m);
  bind_host_agreement(m);
}

}  // namespace ep::bindings
