// Dispatch and combine: constants, argument structs, and a submodule for each table of kernels.
#include <iterator>

#include "bindings/bind.h"
#include "common/api.h"
#include "common/fp8.h"
#include "common/views.h"

namespace ep::bindings {

namespace {

void bind_constants(py::module_& m) {
  m.attr("max_ranks") = kMaxRanks;
  m.attr("max_topk") = kMaxTopk;
  m.attr("max_tokens") = kMaxTokens;
  m.attr("max_row_bytes") = kMaxRowBytes;
  m.attr("max_keys") = kMaxKeys;
  m.attr("row_align") = kRowAlign;
  m.attr("num_totals") = kTotals;
  m.attr("scale_block") = kScaleBlock;
  m.attr("state_bytes") = sizeof(State);
  m.attr("waited_offset") = offsetof(State, waited_ns);
  bind_enum(m, "Op", {{"DISPATCH", kOpDispatch}, {"CACHED_DISPATCH", kOpCachedDispatch}, {"COMBINE", kOpCombine}});
  bind_enum(m, "Layout", {{"FLAT", kFlat}, {"TOKEN_MAJOR", kTokenMajor}});
  bind_enum(m, "Pool", {{"DISPATCH", kDispatchPool}, {"COMBINE", kCombinePool}});
  bind_enum(m, "Step",
            {{"NONE", kNoStep},
             {"PLAN", kPlan},
             {"NOTIFY", kNotify},
             {"DISPATCH_SEND", kDispatchSend},
             {"DISPATCH_RECV", kDispatchRecv},
             {"COMBINE_SEND", kCombineSend},
             {"COMBINE_RECV", kCombineRecv},
             {"PACK", kPack},
             {"COMBINE_ADD", kCombineAdd},
             {"ALL_GATHER", kAllGather},
             {"REDUCE_SCATTER", kReduceScatter},
             {"LL_DISPATCH_SEND", kLlDispatchSend},
             {"LL_DISPATCH_RECV", kLlDispatchRecv},
             {"LL_COMBINE_SEND", kLlCombineSend},
             {"LL_COMBINE_RECV", kLlCombineRecv},
             {"SEND", kSend},
             {"RECEIVE", kReceive}});
  bind_enum(m, "FaultCode",
            {{"NONE", kNoFault},
             {"TIMEOUT", kTimeout},
             {"ABORTED", kAborted},
             {"DISAGREE", kDisagree},
             {"BAD_IDS", kBadIds},
             {"BAD_DATA", kBadData},
             {"TOO_SMALL", kTooSmall},
             {"BAD_HANDLE", kBadHandle},
             {"MASKED", kMasked}});
  bind_enum(m, "Total",
            {{"SLOTS", kTotalSlots}, {"ROWS", kTotalRows}, {"MAX_ROWS", kTotalMaxRows}, {"MAX_SENT", kTotalMaxSent}});
  bind_enum(m, "Element",
            {{"FLOAT32", kFloat32}, {"BFLOAT16", kBFloat16}, {"FLOAT16", kFloat16}, {"FLOAT64", kFloat64}});
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
      .field("control", &Comm::control)
      .field("own_control", &Comm::own_control)
      .def("set_pool", [](Comm& comm, int pool, Address table, Address own, int64_t bytes) {
        if (pool != kDispatchPool && pool != kCombinePool)
          throw py::value_error("pool: expected 0 or 1, got " + std::to_string(pool));
        comm.pool[pool] = table;
        comm.own_pool[pool] = own;
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
      .field("slots", &Routing::slots);
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
  Struct<DispatchSendArgs>(m, "DispatchSendArgs")
      .field("comm", &DispatchSendArgs::comm)
      .field("routing", &DispatchSendArgs::routing)
      .field("header", &DispatchSendArgs::header)
      .field("x", &DispatchSendArgs::x)
      .field("x_stride", &DispatchSendArgs::x_stride)
      .field("scales", &DispatchSendArgs::scales)
      .field("scale_stride", &DispatchSendArgs::scale_stride)
      .field("weights", &DispatchSendArgs::weights)
      .field("num_sms", &DispatchSendArgs::num_sms)
      .field("optimistic", &DispatchSendArgs::optimistic)
      .field("quantize", &DispatchSendArgs::quantize)
      .field("element", &DispatchSendArgs::element)
      .field("stream", &DispatchSendArgs::stream);
  Struct<WaitForSenderArgs>(m, "WaitForSenderArgs")
      .field("comm", &WaitForSenderArgs::comm)
      .field("step", &WaitForSenderArgs::step)
      .field("fresh", &WaitForSenderArgs::fresh)
      .field("stream", &WaitForSenderArgs::stream);
  Struct<DispatchRecvArgs>(m, "DispatchRecvArgs")
      .field("comm", &DispatchRecvArgs::comm)
      .field("routing", &DispatchRecvArgs::routing)
      .field("header", &DispatchRecvArgs::header)
      .field("tokens", &DispatchRecvArgs::tokens)
      .field("scales", &DispatchRecvArgs::scales)
      .field("weights", &DispatchRecvArgs::weights)
      .field("topk_ids", &DispatchRecvArgs::topk_ids)
      .field("row_expert_ids", &DispatchRecvArgs::row_expert_ids)
      .field("expert_count", &DispatchRecvArgs::expert_count)
      .field("expert_offset", &DispatchRecvArgs::expert_offset)
      .field("overflow", &DispatchRecvArgs::overflow)
      .field("capacity", &DispatchRecvArgs::capacity)
      .field("num_sms", &DispatchRecvArgs::num_sms)
      .field("fresh", &DispatchRecvArgs::fresh)
      .field("optimistic", &DispatchRecvArgs::optimistic)
      .field("wide_ids", &DispatchRecvArgs::wide_ids)
      .field("stream", &DispatchRecvArgs::stream);
}

void bind_combine_args(py::module_& m) {
  Struct<CombineSendArgs>(m, "CombineSendArgs")
      .field("comm", &CombineSendArgs::comm)
      .field("routing", &CombineSendArgs::routing)
      .field("header", &CombineSendArgs::header)
      .field("y", &CombineSendArgs::y)
      .field("rows", &CombineSendArgs::rows)
      .field("weights", &CombineSendArgs::weights)
      .field("extra", &CombineSendArgs::extra)
      .field("hidden", &CombineSendArgs::hidden)
      .field("element", &CombineSendArgs::element)
      .field("num_sms", &CombineSendArgs::num_sms)
      .field("per_row", &CombineSendArgs::per_row)
      .field("stream", &CombineSendArgs::stream);
  Struct<CombineRecvArgs>(m, "CombineRecvArgs")
      .field("comm", &CombineRecvArgs::comm)
      .field("routing", &CombineRecvArgs::routing)
      .field("header", &CombineRecvArgs::header)
      .field("out", &CombineRecvArgs::out)
      .field("bias", &CombineRecvArgs::bias)
      .field("extra", &CombineRecvArgs::extra)
      .field("hidden", &CombineRecvArgs::hidden)
      .field("element", &CombineRecvArgs::element)
      .field("num_sms", &CombineRecvArgs::num_sms)
      .field("wide_bias", &CombineRecvArgs::wide_bias)
      .field("stream", &CombineRecvArgs::stream);
  Struct<WeightGradArgs>(m, "WeightGradArgs")
      .field("y", &WeightGradArgs::y)
      .field("rows", &WeightGradArgs::rows)
      .field("factors", &WeightGradArgs::factors)
      .field("dots", &WeightGradArgs::dots)
      .field("num_rows", &WeightGradArgs::num_rows)
      .field("hidden", &WeightGradArgs::hidden)
      .field("element", &WeightGradArgs::element)
      .field("stream", &WeightGradArgs::stream);
}

void bind_node_args(py::module_& m) {
  Struct<QuantizeArgs>(m, "QuantizeArgs")
      .field("x", &QuantizeArgs::x)
      .field("x_stride", &QuantizeArgs::x_stride)
      .field("rows", &QuantizeArgs::rows)
      .field("scales", &QuantizeArgs::scales)
      .field("num_rows", &QuantizeArgs::num_rows)
      .field("hidden", &QuantizeArgs::hidden)
      .field("element", &QuantizeArgs::element)
      .field("stream", &QuantizeArgs::stream);
  Struct<PackArgs>(m, "PackArgs")
      .field("comm", &PackArgs::comm)
      .field("x", &PackArgs::x)
      .field("x_stride", &PackArgs::x_stride)
      .field("row_bytes", &PackArgs::row_bytes)
      .field("rows", &PackArgs::rows)
      .field("weights", &PackArgs::weights)
      .field("weight_bytes", &PackArgs::weight_bytes)
      .field("packed_weights", &PackArgs::packed_weights)
      .field("scales", &PackArgs::scales)
      .field("scale_stride", &PackArgs::scale_stride)
      .field("scale_bytes", &PackArgs::scale_bytes)
      .field("packed_scales", &PackArgs::packed_scales)
      .field("ids", &PackArgs::ids)
      .field("packed_ids", &PackArgs::packed_ids)
      .field("rail_rows", &PackArgs::rail_rows)
      .field("num_rows", &PackArgs::num_rows)
      .field("topk", &PackArgs::topk)
      .field("num_tokens", &PackArgs::num_tokens)
      .field("num_nodes", &PackArgs::num_nodes)
      .field("num_sms", &PackArgs::num_sms)
      .field("stream", &PackArgs::stream);
  Struct<CombineAddArgs>(m, "CombineAddArgs")
      .field("comm", &CombineAddArgs::comm)
      .field("own", &CombineAddArgs::own)
      .field("landed", &CombineAddArgs::landed)
      .field("rail_rows", &CombineAddArgs::rail_rows)
      .field("bias", &CombineAddArgs::bias)
      .field("out", &CombineAddArgs::out)
      .field("own_extra", &CombineAddArgs::own_extra)
      .field("landed_extra", &CombineAddArgs::landed_extra)
      .field("extra_out", &CombineAddArgs::extra_out)
      .field("hidden", &CombineAddArgs::hidden)
      .field("num_rows", &CombineAddArgs::num_rows)
      .field("topk", &CombineAddArgs::topk)
      .field("element", &CombineAddArgs::element)
      .field("num_tokens", &CombineAddArgs::num_tokens)
      .field("num_nodes", &CombineAddArgs::num_nodes)
      .field("node", &CombineAddArgs::node)
      .field("num_sms", &CombineAddArgs::num_sms)
      .field("wide_bias", &CombineAddArgs::wide_bias)
      .field("stream", &CombineAddArgs::stream);
  Struct<AddCountsArgs>(m, "AddCountsArgs")
      .field("sums", &AddCountsArgs::sums)
      .field("counts", &AddCountsArgs::counts)
      .field("row_stride", &AddCountsArgs::row_stride)
      .field("num_rows", &AddCountsArgs::num_rows)
      .field("num_columns", &AddCountsArgs::num_columns)
      .field("stream", &AddCountsArgs::stream);
  Struct<LayoutArgs>(m, "LayoutArgs")
      .field("ids", &LayoutArgs::ids)
      .field("rank_node", &LayoutArgs::rank_node)
      .field("counts", &LayoutArgs::counts)
      .field("in_rank", &LayoutArgs::in_rank)
      .field("num_tokens", &LayoutArgs::num_tokens)
      .field("topk", &LayoutArgs::topk)
      .field("num_ranks", &LayoutArgs::num_ranks)
      .field("num_nodes", &LayoutArgs::num_nodes)
      .field("num_experts", &LayoutArgs::num_experts)
      .field("id_bytes", &LayoutArgs::id_bytes)
      .field("stream", &LayoutArgs::stream);
}

void bind_sizes(py::module_& m) {
  m.def("control_bytes", [](int ranks, int experts) { return control_layout(ranks, experts).bytes; });
  Struct<MetaLayout>(m, "MetaLayout")
      .field("rank_count", &MetaLayout::rank_count)
      .field("expert_count", &MetaLayout::expert_count)
      .field("send_base", &MetaLayout::send_base)
      .field("combine_base", &MetaLayout::combine_base)
      .field("recv_offset", &MetaLayout::recv_offset)
      .field("src_tokens", &MetaLayout::src_tokens)
      .field("token_base", &MetaLayout::token_base)
      .field("flat_base", &MetaLayout::flat_base)
      .field("expert_offset", &MetaLayout::expert_offset)
      .field("expert_rows", &MetaLayout::expert_rows)
      .field("send_chunk_end", &MetaLayout::send_chunk_end)
      .field("recv_chunk_end", &MetaLayout::recv_chunk_end)
      .field("max_rows", &MetaLayout::max_rows)
      .field("words", &MetaLayout::words);
  m.def("meta_layout", &meta_layout);
  m.def("block_count_words", [](int num_tokens, int ranks, int experts) {
    return plan_blocks(num_tokens) * plan_block_words(ranks, experts);
  });
  m.def("slot_bytes", [](int64_t row_bytes, int64_t scale_bytes, int64_t weight_bytes, int64_t topk) {
    return slot_layout(row_bytes, scale_bytes, weight_bytes, topk).bytes;
  });
  m.def("sent_slot_bytes", [](int64_t row_bytes, int64_t scale_bytes, int64_t weight_bytes, int64_t topk) {
    const SlotLayout at = slot_layout(row_bytes, scale_bytes, weight_bytes, topk);
    return at.image - at.ids;
  });
  m.def("partial_bytes", [](int64_t row_bytes, int64_t weight_bytes, int64_t topk) {
    return partial_layout(row_bytes, weight_bytes, topk).bytes;
  });
  m.def("e4m3", [](float magnitude, float scale) { return e4m3_magnitude(Divisor(scale).divide(magnitude)); });
}

}  // namespace

void bind_table(py::module_& m, const char* name, const KernelTable& table) {
  py::module_ sub = m.def_submodule(name);
  sub.attr("table") = reinterpret_cast<Address>(&table);
  bind_kernel(sub, "plan", table.plan);
  bind_kernel(sub, "notify", table.notify);
  bind_kernel(sub, "dispatch_send", table.dispatch_send);
  bind_kernel(sub, "wait_for_sender", table.wait_for_sender);
  bind_kernel(sub, "dispatch_recv", table.dispatch_recv);
  bind_kernel(sub, "combine_send", table.combine_send);
  bind_kernel(sub, "combine_recv", table.combine_recv);
  bind_kernel(sub, "dispatch", table.dispatch);
  bind_kernel(sub, "combine", table.combine);
  bind_kernel(sub, "weight_grad", table.weight_grad);
  bind_kernel(sub, "quantize", table.quantize);
  bind_kernel(sub, "pack", table.pack);
  bind_kernel(sub, "combine_add", table.combine_add);
  bind_kernel(sub, "add_counts", table.add_counts);
  bind_kernel(sub, "layout", table.layout);
}

void bind_kernels(py::module_& m) {
  bind_constants(m);
  bind_sizes(m);
  bind_structs(m);
  bind_dispatch_args(m);
  bind_combine_args(m);
  bind_node_args(m);
  bind_table(m, "cpu", cpu_kernels());
}

}  // namespace ep::bindings
