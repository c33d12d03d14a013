// Legs of low-latency operations, see ll_legs.h.
#include "cpu/moe/ll_legs.h"

#include <algorithm>
#include <utility>

namespace ep::cpu {

namespace {

constexpr int16_t kDropped = -1;

}  // namespace

LlExperts::LlExperts(const LlRun& ll, std::vector<int16_t> ids) : here_(std::move(ids)) {
  if (ll.op.shape.num_nodes == 1) return;
  const Comm& comm = ll.op.comm;
  const int per_rank = local_experts(comm);
  in_node_ = here_;
  node_.assign(here_.size(), -1);
  for (size_t pair = 0; pair < here_.size(); ++pair) {
    const int16_t id = here_[pair];
    if (id == kDropped) continue;
    const int place = ll_place_of(ll.op, id / per_rank);
    node_[pair] = place / comm.num_ranks;
    in_node_[pair] = static_cast<int16_t>(place % comm.num_ranks * per_rank + id % per_rank);
    here_[pair] = node_[pair] == ll.op.node ? in_node_[pair] : kDropped;
  }
}

LlLegHeader& ll_begin_leg(const LlRun& ll, LlLeg leg, char* at) {
  LlLegHeader& header = *reinterpret_cast<LlLegHeader*>(at);
  header = {ll_own_header(ll), ll.run.epoch, leg, 0};
  return header;
}

LlRowLegs::LlRowLegs(const LlRun& ll, const LlPlan& plan, const LlExperts& experts)
    : ll_(ll),
      plan_(plan),
      experts_(experts),
      origins_(ll.op.shape.num_nodes - 1),
      lay_(ll_leg_layout(kLlRows, ll.op.header, ll.op.shape)),
      image_bytes_(ll_image_bytes(ll.op.header.row_bytes, ll.op.header.scale_bytes)) {
  const LlLegs own = ll_legs(ll.op, ll.op.comm.rank);
  for (int origin = 0; origin < origins_; ++origin) {
    legs_.push_back(own.leg(kLlRows, kLlOut, ll.op.slot, origin));
    ll_begin_leg(ll, kLlRows, legs_.back());
    std::fill_n(reinterpret_cast<uint16_t*>(legs_.back() + sizeof(LlLegHeader)), ll.op.shape.node_experts, uint16_t{0});
  }
  if (origins_ > 0) std::fill_n(plan.sent_rows, int64_t{ll.op.header.num_tokens} * ll.op.shape.num_nodes, -1);
}

bool LlRowLegs::goes_to(int token, int origin) const {
  const int64_t begin = int64_t{token} * ll_.op.header.topk;
  const int node = ll_node_of(ll_.op.node, origin);
  for (int64_t pair = begin; pair < begin + ll_.op.header.topk; ++pair)
    if (experts_.node_of(pair) == node) return true;
  return false;
}

void LlRowLegs::append(int token, int origin, const char* image) {
  const int K = ll_.op.header.topk, node = ll_node_of(ll_.op.node, origin);
  char* leg = legs_[origin];
  const int row = reinterpret_cast<LlLegHeader*>(leg)->num_rows++;
  uint16_t* counts = reinterpret_cast<uint16_t*>(leg + sizeof(LlLegHeader));
  char* to = leg + lay_.rows + row * lay_.row_bytes;
  *reinterpret_cast<int32_t*>(to) = token;
  int16_t* ids = reinterpret_cast<int16_t*>(to + kLlRowIds);
  for (int k = 0; k < K; ++k) {
    const int64_t pair = int64_t{token} * K + k;
    const bool is_there = experts_.node_of(pair) == node;
    ids[k] = is_there ? experts_.in_node(pair) : kDropped;
    ids[K + k] = static_cast<int16_t>(is_there ? counts[ids[k]]++ : 0);
  }
  std::memcpy(to + lay_.image, image, image_bytes_);
  plan_.sent_rows[int64_t{token} * ll_.op.shape.num_nodes + node] = row;
}

bool ll_check_leg(const LlRun& ll, LlLeg leg, const char* at, int rank, int tokens, int rows) {
  const LlLegHeader& found = *reinterpret_cast<const LlLegHeader*>(at);
  const Comm& comm = ll.op.comm;
  const LlHeader& mine = ll.op.header;
  const int index = ll_index_of(ll.op, rank), field = ll_header_mismatch(mine, found.header);
  if (field >= 0) {
    const int32_t ours = reinterpret_cast<const int32_t*>(&mine)[field];
    return fail(comm, kDisagree, ll.run.step, index, field, ours,
                reinterpret_cast<const int32_t*>(&found.header)[field]);
  }
  if (found.epoch != ll.run.epoch || found.leg != leg)
    return fail(comm, kBadData, ll.run.step, index, found.leg, static_cast<int64_t>(ll.run.epoch),
                static_cast<int64_t>(found.epoch));
  const int most = mine.max_tokens, theirs = found.header.num_tokens;
  if (theirs < 0 || theirs > most) return fail(comm, kBadData, ll.run.step, index, leg, most, theirs);
  if (tokens >= 0 && theirs != tokens)
    return fail(comm, kDisagree, ll.run.step, index, kLlComparedFields, tokens, theirs);
  const bool fits = rows >= 0 ? found.num_rows == rows : found.num_rows >= 0 && found.num_rows <= most;
  return fits || fail(comm, kBadData, ll.run.step, index, leg, rows >= 0 ? rows : most, found.num_rows);
}

bool ll_relay(const LlRun& ll, LlLeg leg, const LlPlan* plan) {
  const LlOperation& op = ll.op;
  const LlLegs own = ll_legs(op, op.comm.rank);
  for (int origin = 0; origin < own.origins; ++origin) {
    const int place = ll_node_of(op.node, origin) * op.comm.num_ranks + op.comm.rank, rank = ll_rank_at(op, place);
    const int tokens = plan == nullptr ? -1 : plan->src_tokens[rank];
    const int rows = plan == nullptr ? -1 : plan->src_rows[rank];
    if (!ll_check_leg(ll, leg, own.leg(leg, kLlIn, op.slot, origin), rank, tokens, rows)) return false;
    for (int peer = 0; peer < op.comm.num_ranks; ++peer)
      signal(ll_legs(op, peer).arrived(ll.kind, ll.parity, op.comm.rank, origin), ll.run.epoch);
  }
  ll_ring_all(ll);
  return true;
}

bool ll_wait_leg(const LlRun& ll, int forwarder, int origin) {
  const uint64_t* flag = ll_legs(ll.op, ll.op.comm.rank).arrived(ll.kind, ll.parity, forwarder, origin);
  return ll_wait_flag(ll, forwarder, flag) == Wait::kThere;
}

}  // namespace ep::cpu
