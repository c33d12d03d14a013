// Legs of low-latency operations, see ll_legs.h.
#include "cpu/moe/ll_legs.h"

#include <algorithm>

namespace ep::cpu {

namespace {

constexpr int16_t kDropped = -1;

int64_t image_bytes_of(const LlHeader& header) { return ll_image_bytes(header.row_bytes, header.scale_bytes); }

}  // namespace

LlExperts::LlExperts(const LlRun& ll, const std::vector<int16_t>& ids)
    : here_(ids), in_node_(ids), node_(ids.size(), ll.op.node) {
  const Comm& comm = ll.op.comm;
  const int per_rank = local_experts(comm);
  for (size_t pair = 0; pair < ids.size(); ++pair) {
    if (ids[pair] == kDropped) node_[pair] = -1;
    if (ids[pair] == kDropped || ll.op.shape.num_nodes == 1) continue;
    const int place = ll_place_of(ll.op, ids[pair] / per_rank);
    node_[pair] = place / comm.num_ranks;
    in_node_[pair] = static_cast<int16_t>(place % comm.num_ranks * per_rank + ids[pair] % per_rank);
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
      image_bytes_(image_bytes_of(ll.op.header)) {
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

bool ll_check_leg(const LlRun& ll, LlLeg leg, const char* at, int rank, int least_rows, int most_rows) {
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
  const int most = std::min(most_rows, mine.max_tokens);
  if (found.num_rows < least_rows || found.num_rows > most)
    return fail(comm, kBadData, ll.run.step, index, leg, most, found.num_rows);
  const int tokens = found.header.num_tokens;
  return (tokens >= 0 && tokens <= mine.max_tokens) ||
         fail(comm, kBadData, ll.run.step, index, leg, mine.max_tokens, tokens);
}

bool ll_relay(const LlRun& ll, LlLeg leg, const int32_t* expected_rows) {
  const LlOperation& op = ll.op;
  const LlLegs own = ll_legs(op, op.comm.rank);
  for (int origin = 0; origin < own.origins; ++origin) {
    const int place = ll_node_of(op.node, origin) * op.comm.num_ranks + op.comm.rank, rank = ll_rank_at(op, place);
    const int least = expected_rows == nullptr ? 0 : expected_rows[rank];
    const int most = expected_rows == nullptr ? op.header.max_tokens : expected_rows[rank];
    if (!ll_check_leg(ll, leg, own.leg(leg, kLlIn, op.slot, origin), rank, least, most)) return false;
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
