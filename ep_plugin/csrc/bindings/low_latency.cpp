// Low-latency dispatch and combine: constants, structs and sizes.
#include <iterator>

#include "bindings/bind.h"
#include "common/low_latency_args.h"

namespace ep::bindings {

namespace {

// In the order of the struct: a fault names a word of the header by its index.
constexpr std::pair<const char*, int32_t LlHeader::*> kLlHeaderNames[] = {
    {"row_bytes", &LlHeader::row_bytes},
    {"scale_bytes", &LlHeader::scale_bytes},
    {"topk", &LlHeader::topk},
    {"dtype", &LlHeader::dtype},
    {"format", &LlHeader::format},
    {"max_tokens", &LlHeader::max_tokens},
    {"weight_bytes", &LlHeader::weight_bytes},
    {"config_hash", &LlHeader::config_hash},
    {"num_tokens", &LlHeader::num_tokens},
};
static_assert(std::size(kLlHeaderNames) == kLlHeaderFields, "every word of the header has a name");

void bind_constants(py::module_& m) {
  m.attr("ll_few_pairs") = kLlFewPairs;
  m.attr("ll_logfmt_group") = kLlLogfmtGroup;
  m.attr("ll_state_bytes") = sizeof(LlState);
  m.attr("ll_mask_offset") = offsetof(LlState, mask);
  m.attr("ll_epoch_offset") = offsetof(LlState, epoch);
  m.attr("ll_unsignalled_offset") = offsetof(LlState, unsignalled);
  bind_enum(m, "LlFormat",
            {{"PLAIN", kLlPlain},
             {"E4M3", kLlE4m3},
             {"E4M3_POW2", kLlE4m3Pow2},
             {"E4M3_UE8M0", kLlE4m3Ue8m0},
             {"LOGFMT", kLlLogfmt}});
}

void bind_structs(py::module_& m) {
  EP_STRUCT(m, LlShape, max_tokens, max_topk, slot_bytes, num_nodes, node_experts);
  auto header = Struct<LlHeader>(m, "LlHeader");
  py::list names;
  for (const auto& [name, word] : kLlHeaderNames) {
    header.field(name, word);
    names.append(name);
  }
  m.attr("ll_header_fields") = py::tuple(names);
}

void bind_sizes(py::module_& m) {
  m.def("ll_slot_bytes", &ll_slot_bytes);
  m.def("ll_block_bytes", [](int ranks, const LlShape& shape) { return ll_legs_layout(ranks, shape).bytes; });
  m.def("ll_leg_bytes", [](int leg, const LlHeader& header, const LlShape& shape, int64_t num_rows) {
    return ll_leg_layout(leg, header, shape).bytes(num_rows);
  });
  EP_STRUCT(m, LlPlanLayout, layout_range, src_tokens, src_rows, src_info, rows, sent_rows, words);
  m.def("ll_plan_layout", &ll_plan_layout);
}

}  // namespace

void bind_low_latency(py::module_& m) {
  bind_constants(m);
  bind_structs(m);
  bind_sizes(m);
}

}  // namespace ep::bindings
