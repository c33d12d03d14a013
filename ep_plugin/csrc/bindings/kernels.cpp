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
  bind_enum(m, "Op",
            {{"DISPATCH", kOpDispatch},
             {"CACHED_DISPATCH", kOpCachedDispatch},
             {"COMBINE", kOpCombine},
             {"DISPATCH_WITH_CAPACITY", kOpDispatchWithCapacity}});
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
             {"MASKED", kMasked},
             {"BAD_COUNTS", kBadCounts}});
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
  EP_STRUCT(m, Comm, rank, num_ranks, num_experts, gate, plain, num_origins, timeout_ns, state, board, control,
            own_control)
      .def("set_pool", [](Comm& comm, int pool, Address table, Address own, int64_t bytes) {
        if (pool != kDispatchPool && pool != kCombinePool)
          throw py::value_error("pool: expected 0 or 1, got " + std::to_string(pool));
        comm.pool[pool] = table;
        comm.own_pool[pool] = own;
        comm.pool_bytes[pool] = bytes;
      });
  EP_STRUCT(m, Routing, num_tokens, topk, layout, alignment, topk_ids, send_pos, pair_pos, meta, recv_rows, slots);
  auto header = Struct<Header>(m, "Header");
  py::list names;
  for (const auto& [name, word] : kHeaderWords) {
    header.field(name, word);
    names.append(name);
  }
  m.attr("header_fields") = py::tuple(names);
}

void bind_dispatch_args(py::module_& m) {
  EP_STRUCT(m, Nodes, rank_place, num_ranks, num_experts, num_chunks, node, waits);
  EP_STRUCT(m, Origins, messages, chunk, padded);
  EP_STRUCT(m, PlanArgs, comm, routing, nodes, origins, ids, block_counts, id_bytes, stream);
  EP_STRUCT(m, NotifyArgs, comm, routing, header, nodes, origins, block_counts, ticket, segment, stream);
  EP_STRUCT(m, DispatchSendArgs, comm, routing, header, x, x_stride, scales, scale_stride, weights, num_sms, optimistic,
            quantize, element, stream);
  EP_STRUCT(m, DispatchRecvArgs, comm, routing, header, tokens, scales, weights, topk_ids, row_expert_ids, expert_count,
            expert_offset, overflow, capacity, num_sms, fresh, optimistic, wide_ids, in_order, stream);
}

void bind_combine_args(py::module_& m) {
  EP_STRUCT(m, CombineSendArgs, comm, routing, header, y, rows, weights, extra, hidden, element, num_sms, per_row,
            stream);
  EP_STRUCT(m, CombineRecvArgs, comm, routing, header, out, bias, extra, hidden, element, num_sms, wide_bias, in_order,
            stream);
  EP_STRUCT(m, WeightGradArgs, y, rows, factors, dots, num_rows, hidden, element, stream);
}

void bind_node_args(py::module_& m) {
  EP_STRUCT(m, QuantizeArgs, x, x_stride, rows, scales, num_rows, hidden, element, stream);
  EP_STRUCT(m, PackArgs, comm, x, x_stride, row_bytes, rows, weights, weight_bytes, packed_weights, scales,
            scale_stride, scale_bytes, packed_scales, ids, packed_ids, rail_rows, num_rows, topk, num_tokens, num_nodes,
            num_sms, stream);
  EP_STRUCT(m, CombineAddArgs, comm, own, landed, rail_rows, bias, out, own_extra, landed_extra, extra_out, hidden,
            num_rows, topk, element, num_tokens, num_nodes, node, num_sms, wide_bias, stream);
  EP_STRUCT(m, AddCountsArgs, sums, counts, row_stride, num_rows, num_columns, stream);
  EP_STRUCT(m, LayoutArgs, ids, nodes, counts, in_rank, messages, rail_rows, own_ids, header, num_tokens, topk,
            num_nodes, id_bytes, padded, stream);
  EP_STRUCT(m, PlaceArgs, comm, nodes, metas, messages, rail_rows, num_tokens, padded, alignment, stream);
}

void bind_sizes(py::module_& m) {
  m.def("control_bytes",
        [](int ranks, int experts, int origins) { return control_layout(ranks, experts, origins).bytes; });
  EP_STRUCT(m, MetaLayout, rank_count, expert_count, send_base, combine_base, recv_offset, src_tokens, token_base,
            token_rows, flat_base, expert_offset, expert_rows, origin_end, origin_rows, send_chunk_end, recv_chunk_end,
            max_rows, rail_overflow, words);
  m.def("meta_layout", &meta_layout);
  m.def("block_count_words", [](int num_tokens, int ranks, int experts) {
    return plan_blocks(num_tokens) * plan_block_words(ranks, experts);
  });
  m.attr("rail_overflow_words") = kRailOverflowWords;
  m.attr("message_head_words") = MessageLayout(1, 1, 1).tokens(0);
  m.attr("waits_head_words") = static_cast<int>(kWaitedFor);
  m.def("address", [](const py::object& tensor) {
    return tensor.is_none() ? Address{0} : tensor.attr("data_ptr")().cast<Address>();
  });
  m.def("message_words",
        [](int chunks, int ranks, int experts) { return MessageLayout(chunks, ranks, experts).words(); });
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
  sub.attr("low_latency_over_nodes") = table.low_latency_over_nodes;
  bind_kernel(sub, "plan", table.plan);
  bind_kernel(sub, "positions", table.positions);
  bind_kernel(sub, "notify", table.notify);
  bind_kernel(sub, "place", table.place);
  bind_kernel(sub, "dispatch_send", table.dispatch_send);
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
