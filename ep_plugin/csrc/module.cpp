// Python's view of the kernels: argument structs made from keywords, one function per kernel and device, the board.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <functional>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "api.h"
#include "board.h"
#include "collectives.h"
#include "fp8.h"
#include "tensor.h"
#include "views.h"
#if defined(EP_WITH_CUDA)
#include "cuda/host.h"
#include "wire.h"
#endif

namespace py = pybind11;
using namespace ep;

namespace {

// A struct whose fields are given by keyword; what is not given is zero, a name it lacks is an AttributeError. One is
// made for every launch, so each value goes straight to its field.
template <class Args>
class Struct : public py::class_<Args> {
 public:
  Struct(py::module_& m, const char* name) : py::class_<Args>(m, name), fields_(std::make_shared<Fields>()) {
    this->def(py::init([fields = fields_](const py::kwargs& given) {
      Args args{};
      size_t guess = 0;  // callers name fields in the struct's order
      for (auto [name, value] : given) {
        const size_t at = index_of(*fields, name, guess);
        (*fields)[at].read(args, value);
        guess = at + 1;
      }
      return args;
    }));
  }

  template <class Value>
  Struct& field(const char* name, Value Args::* member) {
    this->def_readwrite(name, member);
    auto read = [member](Args& args, py::handle value) { args.*member = value.cast<Value>(); };
    fields_->push_back({py::str(name).release().ptr(), std::move(read)});
    PyUnicode_InternInPlace(&fields_->back().name);
    return *this;
  }

 private:
  struct Field {
    PyObject* name;  // interned, as keywords are; never given back, since classes live as long as the process
    std::function<void(Args&, py::handle)> read;
  };
  using Fields = std::vector<Field>;

  static size_t index_of(const Fields& fields, py::handle name, size_t guess) {
    for (size_t i = 0; i < fields.size(); ++i)
      if (const size_t at = (guess + i) % fields.size(); fields[at].name == name.ptr()) return at;
    for (size_t at = 0; at < fields.size(); ++at)
      if (PyUnicode_Compare(fields[at].name, name.ptr()) == 0) return at;
    throw py::attribute_error("no field " + name.cast<std::string>());
  }

  const std::shared_ptr<Fields> fields_;
};

// An enum as Python's IntEnum: its members are the numbers that structs and faults hold.
void bind_enum(py::module_& m, const char* name, std::initializer_list<std::pair<const char*, int64_t>> members) {
  py::dict named;
  for (const auto& [member, value] : members) named[member] = value;
  m.attr(name) = py::module_::import("enum").attr("IntEnum")(name, named, py::arg("module") = m.attr("__name__"));
}

void bind_constants(py::module_& m) {
  m.attr("max_ranks") = kMaxRanks;
  m.attr("max_topk") = kMaxTopk;
  m.attr("most_tokens") = kMostTokens;
  m.attr("most_row_bytes") = kMostRowBytes;
  m.attr("most_keys") = kMostKeys;
  m.attr("row_align") = kRowAlign;
  m.attr("num_totals") = kTotals;
  m.attr("scale_block") = kScaleBlock;
  m.attr("state_bytes") = sizeof(State);
  bind_enum(m, "Op", {{"DISPATCH", kOpDispatch}, {"CACHED_DISPATCH", kOpCachedDispatch}, {"COMBINE", kOpCombine}});
  bind_enum(m, "Layout", {{"FLAT", kFlat}, {"TOKEN_MAJOR", kTokenMajor}});
  bind_enum(m, "Pool", {{"DISPATCH", kDispatchPool}, {"COMBINE", kCombinePool}});
  bind_enum(m, "Step",
            {{"NONE", kNoStep},
             {"PLAN", kPlan},
             {"NOTIFY", kNotify},
             {"SEND", kSend},
             {"EXPAND", kExpand},
             {"COMBINE", kCombine},
             {"ADD", kAdd},
             {"GATHER", kGather},
             {"SCATTER", kScatter}});
  bind_enum(m, "FaultCode",
            {{"NONE", kNoFault},
             {"TIMEOUT", kTimeout},
             {"ABORTED", kAborted},
             {"DISAGREE", kDisagree},
             {"BAD_IDS", kBadIds},
             {"BAD_DATA", kBadData},
             {"TOO_SMALL", kTooSmall}});
  bind_enum(m, "Total",
            {{"SLOTS", kTotalSlots}, {"ROWS", kTotalRows}, {"MAX_ROWS", kTotalMaxRows}, {"MAX_SENT", kTotalMaxSent}});
  bind_enum(m, "Element",
            {{"FLOAT32", kFloat32}, {"BFLOAT16", kBFloat16}, {"FLOAT16", kFloat16}, {"FLOAT64", kFloat64}});
}

// One word for each rank.
template <class Word>
void set_words(Word* to, const std::vector<Word>& from) {
  if (from.size() > kMaxRanks)
    throw py::value_error("ranks: expected at most " + std::to_string(kMaxRanks) + ", got " +
                          std::to_string(from.size()));
  std::copy(from.begin(), from.end(), to);
}

// In the order of the struct: a fault names a word of the header by its index.
constexpr std::pair<const char*, int64_t Header::*> kHeaderWords[] = {
    {"op", &Header::op},
    {"row_bytes", &Header::row_bytes},
    {"scale_bytes", &Header::scale_bytes},
    {"weight_bytes", &Header::weight_bytes},
    {"topk", &Header::topk},
    {"dtype", &Header::dtype},
    {"layout", &Header::layout},
    {"config_hash", &Header::config_hash},
    {"num_tokens", &Header::num_tokens},
};
static_assert(std::size(kHeaderWords) == kHeaderFields, "every word of the header has a name");

void bind_structs(py::module_& m) {
  Struct<Comm>(m, "Comm")
      .field("rank", &Comm::rank)
      .field("num_ranks", &Comm::num_ranks)
      .field("num_experts", &Comm::num_experts)
      .field("gate", &Comm::gate)
      .field("plain", &Comm::plain)
      .field("timeout_ns", &Comm::timeout_ns)
      .field("state", &Comm::state)
      .field("board", &Comm::board)
      .def("set_control", [](Comm& comm, const std::vector<Address>& ranks) { set_words(comm.control, ranks); })
      .def("set_pool", [](Comm& comm, int pool, const std::vector<Address>& ranks, int64_t bytes) {
        if (pool != kDispatchPool && pool != kCombinePool)
          throw py::value_error("pool: expected 0 or 1, got " + std::to_string(pool));
        set_words(comm.pool[pool], ranks);
        comm.pool_bytes[pool] = bytes;
      });
  Struct<Routing>(m, "Routing")
      .field("num_tokens", &Routing::num_tokens)
      .field("topk", &Routing::topk)
      .field("layout", &Routing::layout)
      .field("alignment", &Routing::alignment)
      .field("topk_ids", &Routing::topk_ids)
      .field("send_pos", &Routing::send_pos)
      .field("pair_pos", &Routing::pair_pos)
      .field("meta", &Routing::meta)
      .field("recv_rows", &Routing::recv_rows)
      .field("slots", &Routing::slots)
      .def("lies_at", [](const Routing& routing, Address topk_ids, Address plan, Address recv_rows) {
        return routing.topk_ids == topk_ids && routing.meta == plan && routing.recv_rows == recv_rows;
      });
  auto header = Struct<Header>(m, "Header");
  py::list names;
  for (const auto& [name, word] : kHeaderWords) {
    header.field(name, word);
    names.append(name);
  }
  m.attr("header_fields") = py::tuple(names);
}

void bind_dispatch_args(py::module_& m) {
  Struct<PlanArgs>(m, "PlanArgs")
      .field("comm", &PlanArgs::comm)
      .field("routing", &PlanArgs::routing)
      .field("ids", &PlanArgs::ids)
      .field("block_counts", &PlanArgs::block_counts)
      .field("id_bytes", &PlanArgs::id_bytes)
      .field("stream", &PlanArgs::stream);
  Struct<NotifyArgs>(m, "NotifyArgs")
      .field("comm", &NotifyArgs::comm)
      .field("routing", &NotifyArgs::routing)
      .field("header", &NotifyArgs::header)
      .field("block_counts", &NotifyArgs::block_counts)
      .field("ticket", &NotifyArgs::ticket)
      .field("stream", &NotifyArgs::stream);
  Struct<SendArgs>(m, "SendArgs")
      .field("comm", &SendArgs::comm)
      .field("routing", &SendArgs::routing)
      .field("header", &SendArgs::header)
      .field("x", &SendArgs::x)
      .field("x_stride", &SendArgs::x_stride)
      .field("scales", &SendArgs::scales)
      .field("scale_stride", &SendArgs::scale_stride)
      .field("weights", &SendArgs::weights)
      .field("num_sms", &SendArgs::num_sms)
      .field("optimistic", &SendArgs::optimistic)
      .field("quantize", &SendArgs::quantize)
      .field("element", &SendArgs::element)
      .field("stream", &SendArgs::stream);
  Struct<AdmitArgs>(m, "AdmitArgs")
      .field("comm", &AdmitArgs::comm)
      .field("step", &AdmitArgs::step)
      .field("fresh", &AdmitArgs::fresh)
      .field("stream", &AdmitArgs::stream);
  Struct<ExpandArgs>(m, "ExpandArgs")
      .field("comm", &ExpandArgs::comm)
      .field("routing", &ExpandArgs::routing)
      .field("header", &ExpandArgs::header)
      .field("tokens", &ExpandArgs::tokens)
      .field("scales", &ExpandArgs::scales)
      .field("weights", &ExpandArgs::weights)
      .field("topk_ids", &ExpandArgs::topk_ids)
      .field("row_expert_ids", &ExpandArgs::row_expert_ids)
      .field("expert_count", &ExpandArgs::expert_count)
      .field("expert_offset", &ExpandArgs::expert_offset)
      .field("overflow", &ExpandArgs::overflow)
      .field("capacity", &ExpandArgs::capacity)
      .field("num_sms", &ExpandArgs::num_sms)
      .field("fresh", &ExpandArgs::fresh)
      .field("optimistic", &ExpandArgs::optimistic)
      .field("stream", &ExpandArgs::stream);
}

void bind_combine_args(py::module_& m) {
  Struct<PushArgs>(m, "PushArgs")
      .field("comm", &PushArgs::comm)
      .field("routing", &PushArgs::routing)
      .field("header", &PushArgs::header)
      .field("y", &PushArgs::y)
      .field("rows", &PushArgs::rows)
      .field("weights", &PushArgs::weights)
      .field("extra", &PushArgs::extra)
      .field("hidden", &PushArgs::hidden)
      .field("element", &PushArgs::element)
      .field("num_sms", &PushArgs::num_sms)
      .field("stream", &PushArgs::stream);
  Struct<AddArgs>(m, "AddArgs")
      .field("comm", &AddArgs::comm)
      .field("routing", &AddArgs::routing)
      .field("header", &AddArgs::header)
      .field("out", &AddArgs::out)
      .field("bias", &AddArgs::bias)
      .field("extra", &AddArgs::extra)
      .field("hidden", &AddArgs::hidden)
      .field("element", &AddArgs::element)
      .field("num_sms", &AddArgs::num_sms)
      .field("stream", &AddArgs::stream);
  Struct<WeighBackArgs>(m, "WeighBackArgs")
      .field("y", &WeighBackArgs::y)
      .field("rows", &WeighBackArgs::rows)
      .field("factors", &WeighBackArgs::factors)
      .field("dots", &WeighBackArgs::dots)
      .field("num_rows", &WeighBackArgs::num_rows)
      .field("hidden", &WeighBackArgs::hidden)
      .field("element", &WeighBackArgs::element)
      .field("stream", &WeighBackArgs::stream);
}

// Whether a signal handler has raised, such as Ctrl-C's: the exception then stays set for whoever called the wait.
// Python handles signals on its main thread alone, so the others need not take the interpreter's lock.
bool signal_has_raised() {
  if (syscall(SYS_gettid) != getpid()) return false;
  py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

void raise_interruption() {
  if (PyErr_Occurred()) throw py::error_already_set();
}

// Kernels run, or are enqueued, without the interpreter's lock.
template <class... Args>
void bind_kernel(py::module_& m, const char* name, void (*kernel)(const Args&...)) {
  m.def(name, [kernel](const Args&... args) {
    {
      py::gil_scoped_release release;
      kernel(args...);
    }
    raise_interruption();
  });
}

void bind_table(py::module_& m, const char* name, const KernelTable& table) {
  py::module_ sub = m.def_submodule(name);
  bind_kernel(sub, "plan", table.plan);
  bind_kernel(sub, "notify", table.notify);
  bind_kernel(sub, "send", table.send);
  bind_kernel(sub, "admit", table.admit);
  bind_kernel(sub, "expand", table.expand);
  bind_kernel(sub, "push", table.push);
  bind_kernel(sub, "add", table.add);
  bind_kernel(sub, "send_and_expand", table.send_and_expand);
  bind_kernel(sub, "push_and_add", table.push_and_add);
  bind_kernel(sub, "weigh_back", table.weigh_back);
}

// A list of numbers as the field of a struct that is an array.
template <class Args, class Word>
auto array_of(Word (Args::*member)[kMaxRanks]) {
  return [member](Args& args, const std::vector<Word>& from) { set_words(args.*member, from); };
}

void bind_collectives(py::module_& m) {
  m.attr("collective_control_bytes") = sizeof(CollectiveControl);
  m.attr("max_blocks") = kMaxPeerBlocks;
  m.attr("requests_bytes") = sizeof(Requests);
  m.attr("call_ring_bytes") = sizeof(Call) * kCalls;
  bind_enum(m, "CollectiveOp", {{"ALL_GATHER", kOpAllGather}, {"REDUCE_SCATTER", kOpReduceScatter}});
  m.attr("offer_fields") = py::make_tuple("op", "bytes", "element");
  Struct<Piece>(m, "Piece")
      .field("bytes", &Piece::bytes)
      .field("block", &Piece::block)
      .field("num_blocks", &Piece::num_blocks)
      .field("blocks", &Piece::blocks)
      .field("block_bytes", &Piece::block_bytes)
      .def("set_offset", array_of(&Piece::offset));
  Struct<GatherArgs>(m, "GatherArgs")
      .field("comm", &GatherArgs::comm)
      .field("piece", &GatherArgs::piece)
      .field("input", &GatherArgs::input)
      .def("set_outputs", array_of(&GatherArgs::outputs));
  Struct<ScatterArgs>(m, "ScatterArgs")
      .field("comm", &ScatterArgs::comm)
      .field("piece", &ScatterArgs::piece)
      .field("output", &ScatterArgs::output)
      .field("scale", &ScatterArgs::scale)
      .field("element", &ScatterArgs::element)
      .def("set_inputs", array_of(&ScatterArgs::inputs));
  py::module_ cpu = m.attr("cpu");
  bind_kernel(cpu, "gather", &cpu::gather);
  bind_kernel(cpu, "scatter", &cpu::scatter);
  m.attr("device_control_bytes") = sizeof(DeviceControl);
  m.attr("staging_block") = kStagingBlock;
  m.attr("most_ctas") = kMostCtas;
  m.attr("most_lanes") = kMostLanes;
  Struct<PushShardArgs>(m, "PushShardArgs")
      .field("comm", &PushShardArgs::comm)
      .field("input", &PushShardArgs::input)
      .field("bytes", &PushShardArgs::bytes)
      .field("landing", &PushShardArgs::landing)
      .field("place", &PushShardArgs::place)
      .field("block", &PushShardArgs::block)
      .field("num_ctas", &PushShardArgs::num_ctas)
      .field("captured", &PushShardArgs::captured)
      .field("number", &PushShardArgs::number)
      .field("begun", &PushShardArgs::begun)
      .field("finished", &PushShardArgs::finished)
      .field("stream", &PushShardArgs::stream)
      .def("set_targets", array_of(&PushShardArgs::targets))
      .def("set_stream_words", array_of(&PushShardArgs::stream_words))
      .def("set_outputs", array_of(&PushShardArgs::outputs));
  m.def("lane_slots_bytes", &lane_slots_bytes);
  Struct<SumShardsArgs>(m, "SumShardsArgs")
      .field("comm", &SumShardsArgs::comm)
      .field("output", &SumShardsArgs::output)
      .field("bytes", &SumShardsArgs::bytes)
      .field("scale", &SumShardsArgs::scale)
      .field("element", &SumShardsArgs::element)
      .field("num_ctas", &SumShardsArgs::num_ctas)
      .field("stream", &SumShardsArgs::stream)
      .def("set_inputs", array_of(&SumShardsArgs::inputs))
      .def("set_slots", array_of(&SumShardsArgs::slots));
  m.attr("small_bytes") = kSmallBytes;
  m.def("small_words_bytes", &small_words_bytes);
  Struct<SmallShardsArgs>(m, "SmallShardsArgs")
      .field("comm", &SmallShardsArgs::comm)
      .field("bytes", &SmallShardsArgs::bytes)
      .field("scale", &SmallShardsArgs::scale)
      .field("element", &SmallShardsArgs::element)
      .field("num_ctas", &SmallShardsArgs::num_ctas)
      .field("stream", &SmallShardsArgs::stream)
      .def("set_words", array_of(&SmallShardsArgs::words))
      .def("set_inputs", array_of(&SmallShardsArgs::inputs))
      .def("set_outputs", array_of(&SmallShardsArgs::outputs));
  m.def("lend_bytes", &lend_bytes);
  m.def("place_word", &place_word);
  m.attr("stream_words_shape") = py::make_tuple(2, kMaxPeerBlocks + 1, kMaxRanks);  // ready and done
  m.attr("stream_words_bytes") = sizeof(StreamWords);
#if defined(EP_WITH_CUDA)
  py::module_ cuda = m.attr("cuda");
  bind_kernel(cuda, "push_shard", &cuda::push_shard);
  bind_kernel(cuda, "small_shards", &cuda::small_shards);
  bind_kernel(cuda, "sum_shards", &cuda::sum_shards);
#endif
  m.attr("fault_offset") = offsetof(State, fault);
  m.def("fault_board", &fault_board);
  m.def("post_request", &post_request);
  m.def("release_block", &release_block);
  // The same as what a weak reference calls, which passes itself: nothing in it can be interrupted.
  m.def("release_dead_block", [](Address requests, int block, uint64_t uses, int process, const py::object&) {
    if (getpid() == process) release_block(requests, block, uses);
  });
  m.def("read_request", [](Address requests, uint64_t number) {
    const Request& row = at<Requests>(requests)->rows[number % kRequests];
    return py::make_tuple(row.bytes, row.free);
  });
  // Of the ranks with these requests: (whether all of them had the block free, the first that did not say or -1).
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
  // None, or how a peer's call differs: (peer, field, mine, theirs).
  m.def("post_call",
        [](Address rings, int num_ranks, int rank, uint64_t number, int64_t bytes, int64_t element,
           int64_t place) -> py::object {
          CallDifference found;
          if (!post_call(rings, num_ranks, rank, number, {bytes, element, place}, &found)) return py::none();
          return py::make_tuple(found.peer, found.field, found.mine, found.theirs);
        });
  // The first of the ranks with these requests that has not come to request `number` in time, or -1.
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

py::object fault_of(Address address) {
  const Board& board = *at<Board>(address);
  if (__atomic_load_n(&board.fault_set, __ATOMIC_ACQUIRE) == 0) return py::none();
  const Fault& f = board.fault;
  return py::make_tuple(f.code, f.step, f.peer, f.field, f.expected, f.seen);
}

// Cut or torn text is still text: what is not UTF-8 is replaced.
py::str text_of(const char* text, size_t size) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(strnlen(text, size)), "replace"));
}

py::object abort_of(Address address) {
  const Board& board = *at<Board>(address);
  const uint32_t by = __atomic_load_n(&board.abort, __ATOMIC_ACQUIRE);
  if (by == 0) return py::none();
  return py::make_tuple(static_cast<int>(by) - 1, text_of(board.reason, sizeof(board.reason)));
}

bool is_quiet(Address address) {
  const Board& board = *at<Board>(address);
  return __atomic_load_n(&board.fault_set, __ATOMIC_ACQUIRE) == 0 &&
         __atomic_load_n(&board.abort, __ATOMIC_ACQUIRE) == 0;
}

void bind_board(py::module_& m) {
  m.def("board_bytes", &board_bytes);
  m.def("board_quiet", &is_quiet);
  m.def("board_fault", &fault_of);
  m.def("board_abort", &abort_of);
  m.def("abort_board", &abort_board);
  m.def("list_board", &list_board);
  m.def("unlist_board", &unlist_board);
  m.def("announce", &announce);
  m.def("board_activity", [](Address address) {
    const Board& board = *at<Board>(address);
    return text_of(board.activity, sizeof(board.activity));
  });
  m.def("wait_ticket", [](Address address, uint64_t ticket, int64_t timeout_ns) {
    WaitResult result;
    {
      py::gil_scoped_release release;
      result = wait_ticket(address, ticket, timeout_ns);
    }
    raise_interruption();
    return static_cast<int>(result);
  });
  m.def("board_totals", [](Address address, int local_experts, Address copy, Address expert_counts) {
    const int64_t* totals = at<int64_t>(address, sizeof(Board));
    std::copy_n(totals, kTotals + local_experts, at<int64_t>(copy));
    std::copy_n(totals + kTotals, local_experts, at<int64_t>(expert_counts));
    return std::vector<int64_t>(totals, totals + kTotals);
  });
  m.def("set_reserved_pools", [](Address address, uint64_t count) {
    __atomic_store_n(&at<Board>(address)->reserved_pools, count, __ATOMIC_RELEASE);
  });
  m.def("reserved_pools",
        [](Address address) { return __atomic_load_n(&at<Board>(address)->reserved_pools, __ATOMIC_ACQUIRE); });
  m.def("gate_reached",
        [](Address address) { return __atomic_load_n(&at<Board>(address)->gate_reached, __ATOMIC_ACQUIRE); });
  m.def("open_gate", [](Address address) { __atomic_store_n(&at<Board>(address)->gate_open, 1u, __ATOMIC_RELEASE); });
  m.def("find_bad_id",
        [](Address ids, int id_bytes, int64_t num_tokens, int64_t topk, int64_t num_experts) -> py::object {
          BadId bad;
          if (!find_bad_id(ids, id_bytes, num_tokens, topk, num_experts, &bad)) return py::none();
          return py::make_tuple(bad.token, bad.k, bad.id, bad.repeated);
        });
}

#if defined(EP_WITH_CUDA)
void bind_wire(py::module_& m) {
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
  m.def("wire", &wire, py::call_guard<py::gil_scoped_release>());
  m.def("hold", &hold, py::call_guard<py::gil_scoped_release>());
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Kernels of ep_plugin: pointers and streams are integers.";
  set_interruption(&signal_has_raised);
  bind_constants(m);
  m.def("control_bytes", [](int ranks, int experts) { return control_layout(ranks, experts).bytes; });
  m.def("meta_words", [](int ranks, int experts) { return meta_layout(ranks, experts).words; });
  m.def("block_count_words", [](int num_tokens, int ranks, int experts) {
    return plan_blocks(num_tokens) * plan_block_words(ranks, experts);
  });
  m.def("slot_bytes", [](int64_t row_bytes, int64_t scale_bytes, int64_t weight_bytes, int64_t topk) {
    return slot_layout(row_bytes, scale_bytes, weight_bytes, topk).bytes;
  });
  m.def("partial_bytes", [](int64_t row_bytes, int64_t weight_bytes, int64_t topk) {
    return partial_layout(row_bytes, weight_bytes, topk).bytes;
  });
  m.def("e4m3", [](float magnitude, float scale) { return e4m3_magnitude(Divisor(scale).divide(magnitude)); });
  bind_structs(m);
  bind_dispatch_args(m);
  bind_combine_args(m);
  bind_board(m);
  bind_table(m, "cpu", cpu_kernels());
#if defined(EP_WITH_CUDA)
  bind_table(m, "cuda", cuda_kernels());
  bind_wire(m);
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("order_streams", &order_streams, py::call_guard<py::gil_scoped_release>());
  m.def("stream_capture", &stream_capture);
#endif
  bind_collectives(m);
}
