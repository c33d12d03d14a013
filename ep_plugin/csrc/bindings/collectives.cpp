// All-gather and reduce-scatter: the part of their engines in C, and requests for blocks.
#include <unistd.h>

#include "bindings/functions.h"
#include "bindings/tensor.h"
#include "common/board.h"
#include "common/views.h"
#include "control/collectives.h"

namespace ep::bindings {

namespace {

using control::CollectiveNode;
using control::KnownCollective;
using control::Ways;

void bind_constants(py::module_& m) {
  m.attr("collective_control_bytes") = sizeof(CollectiveControl);
  m.attr("device_control_bytes") = sizeof(DeviceControl);
  m.attr("max_blocks") = kMaxPeerBlocks;
  m.attr("staging_block") = kStagingBlock;
  m.attr("words_block") = control::kWords;
  m.attr("cells_block") = control::kCells;
  m.attr("max_ctas") = kMaxCtas;
  m.attr("max_channels") = kMaxChannels;
  m.attr("small_bytes") = kSmallBytes;
  m.attr("requests_bytes") = sizeof(Requests);
  m.attr("call_ring_bytes") = sizeof(CallRow) * kCalls;
  m.attr("stream_words_shape") = py::make_tuple(2, kMaxPeerBlocks + 1, kMaxRanks);  // ready and done
  m.attr("stream_words_bytes") = sizeof(StreamWords);
  m.attr("piece_fields") = py::make_tuple("op", "bytes", "element");
  bind_enum(m, "CollectiveOp", {{"ALL_GATHER", kOpAllGather}, {"REDUCE_SCATTER", kOpReduceScatter}});
  m.def("channel_cells_bytes", &channel_cells_bytes);
  m.def("small_words_bytes", &small_words_bytes);
  m.def("dlpack_bytes", &dlpack_bytes);
  m.def("place_word", &place_word);
  // By the address of their arguments, for tests.
  py::module_ cpu = m.attr("cpu");
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  cpu.def("all_gather", [](Address args) { cpu::all_gather(*at<CpuAllGatherArgs>(args)); }, Unlocked());
  cpu.def("reduce_scatter", [](Address args) { cpu::reduce_scatter(*at<CpuReduceScatterArgs>(args)); }, Unlocked());
}

void set_memory(CollectiveNode& node, int number, const std::vector<Address>& addresses, int64_t bytes, Address table,
                Address host_table) {
  control::Memories& to = node.memories;
  if (number < 0 || number >= control::kMemories) throw py::index_error("number: expected that of a memory");
  set_words(to.addresses[number], addresses);
  to.own[number] = addresses.at(node.comm->rank);
  to.bytes[number] = bytes;
  to.tables[number] = table;
  to.host_tables[number] = host_table;
}

void exchange(CollectiveNode& node, const py::object& own, const py::list& parts, int element, double scale) {
  control::Shards shards{address_of(own), own.attr("nbytes").cast<int64_t>(), element, scale, {}};
  if (py::len(parts) != static_cast<size_t>(node.comm->num_ranks))
    throw py::value_error("parts: expected one per rank");
  for (py::handle part : parts) shards.parts.push_back(address_of(part));
  uint64_t stream = 0, capture = 0;
  if (!node.find_stream(&stream, &capture)) throw py::value_error("device: expected the current one to be this node's");
  require(node.exchange(shards, stream, capture != 0));
}

PyObject* run(KnownCollective& known, const KnownCollective::Given& given) { return known.run(given); }

void bind_node(py::module_& m) {
  py::class_<Ways>(m, "Ways")
      .def(py::init([](const std::string& path, int ranks, int most_sum_sms, int64_t engines_from,
                       int64_t staging_bytes) { return Ways{path, ranks, most_sum_sms, engines_from, staging_bytes}; }))
      .def("gather_sms", &Ways::gather_ctas)
      .def("sum_sms", &Ways::sum_ctas)
      .def_property_readonly("staged_bytes", &Ways::staged_bytes);
  py::class_<CollectiveNode, std::shared_ptr<CollectiveNode>>(m, "CollectiveNode")
      .def(
          py::init([](const py::object& owner, const py::object& running, const py::object& device,
                      std::shared_ptr<control::CallLog> log, const std::string& name, Address board, int device_index) {
            return std::make_shared<CollectiveNode>(owner.ptr(), running.ptr(), device.ptr(), std::move(log), name,
                                                    board, device_index);
          }))
      .def("set_comm", &set_comm<CollectiveNode>)
      .def("set_streams",
           [](CollectiveNode& node, const py::object& streams) {
             node.caller = [streams] { return streams.attr("caller")().cast<uint64_t>(); };
             node.capturing = [streams] { return streams.attr("capturing")().cast<uint64_t>(); };
           })
      .def("set_memory", &set_memory)
      .def("block_of",
           [](const CollectiveNode& node, const py::object& tensor) {
             return node.memories.find(address_of(tensor), tensor.attr("nbytes").cast<int64_t>());
           })
      .def("exchange", &exchange, py::arg("own"), py::arg("parts"), py::pos_only(), py::arg("element") = -1,
           py::arg("scale") = 1.0)
      .def_readwrite("kernels", &CollectiveNode::kernels)
      .def_readwrite("ways", &CollectiveNode::ways)
      .def_readwrite("order", &CollectiveNode::order)
      .def_readwrite("calls", &CollectiveNode::calls)
      .def_readwrite("compares_calls", &CollectiveNode::compares_calls)
      .def_readwrite("stream_words", &CollectiveNode::stream_words)
      .def_readwrite("progress", &CollectiveNode::progress);
  py::class_<KnownCollective, std::shared_ptr<KnownCollective>>(m, "KnownCollective")
      .def(py::init([](const py::str& name, bool gathers, bool is_alone) {
        return std::make_shared<KnownCollective>(name.ptr(), gathers, is_alone);
      }))
      .def("function",
           [](const std::shared_ptr<KnownCollective>& known) {
             return function_of<KnownCollective, KnownCollective, &run>(known, "collective");
           })
      .def("learn", [](KnownCollective& known, py::handle output, py::handle input, int64_t bytes,
                       int element) { known.learn(output.ptr(), input.ptr(), bytes, element); })
      .def_readwrite("node", &KnownCollective::node)
      .def_readwrite("is_alone", &KnownCollective::is_alone)
      .def_readonly("num_calls", &KnownCollective::num_calls);
}

// Requests for blocks.
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
  bind_constants(m);
  bind_node(m);
  bind_host_agreement(m);
}

}  // namespace ep::bindings
