// The kernels of low-latency dispatch and combine: one struct of arguments each, for both halves, and typed pointers
// into the memory that common/low_latency.h and common/low_latency_legs.h describe. The rules of common/api.h for
// kernels hold here, too.
#pragma once
#include "common/low_latency_legs.h"
#include "common/views.h"

namespace ep {

// The arguments of both kernels. `comm.control` has the block of each rank. The host sets the header except `mask`.
// `slot` is an entry of LlState::slot_epoch. Operations of a kind use two entries in turn. A kernel runs the halves in
// `phases`. With both, receiving need not wait until sending has ended. The kernel adds the nanoseconds that it waits
// to `wait_cost`.
//
// Over several nodes `comm` is the own node, and phases are kernels of their own: the host sends and receives legs
// between them.
//   dispatch  send half, legs with rows, receive half
//   combine   send half, legs with weights, forwarding, legs with sums, receive half
struct LlOperation {
  Comm comm;
  LlShape shape;
  int32_t node;    // this rank's
  Address places;  // int32 [2][R]: (node * G + local rank) of each rank of the group, then the rank of each place; one
                   // node: 0, and ranks are places
  LlHeader header;
  int32_t phases;  // LlPhase bits
  int32_t slot;
  int32_t shrink;     // 1: a wait that passes its deadline masks the rank; 0: it is a fault
  int32_t num_sms;    // CUDA
  Address state;      // LlState
  Address wait_cost;  // int64 [R]: time waited for each rank's ids and rows, or weights and rows; or 0. Kernels
                      // wait for the ranks of their own node; the host adds the time of its waits for legs
  Address stream;
};

// Output rows past an expert's count, and their scales and src_info, are not written. After a fault the counts are
// zeros, except the cumulative counts.
struct LlDispatchArgs {
  LlOperation op;
  // Send. Ids outside [-1, E) are recorded as kBadIds (field: the token) and count as dropped. A pair has a row of its
  // own even if its token names the expert twice; more rows than a source has tokens are recorded as kBadData.
  Address x;  // [T] rows, x_stride bytes apart: row_bytes each or, if quantised, row_bytes elements
  int64_t x_stride;
  Address ids;       // [T,K] contiguous, as the caller gave them: experts of all nodes
  Address topk_ids;  // out: int32 [T,K], for the handle; or 0
  int32_t id_bytes;  // 4 or 8
  int32_t element;   // type of x if it is quantised: kFloat32, kBFloat16 or kFloat16
  // Receive. Rows are R * T_max for each expert. S: scales of a row.
  Address tokens;  // [E_l, rows, row_bytes]
  Address scales;  // kLlE4m3, kLlE4m3Pow2: float32 [E_l, S, rows]; kLlE4m3Ue8m0: int32 [E_l, ceil(S / 4), rows]; or 0
  Address plan;    // [ll_plan_layout().words]
  Address expert_count;   // int32 [E_l]
  Address expert_offset;  // int32 [E_l+1]: e * rows
  Address cumulative;     // int32 [E_l]: expert_count is added to it; or 0
};

// A pair is named if the owner's id for it is not -1 now. The owner may name fewer pairs than the dispatch did, but no
// others: it would wait for rows that nobody sends.
struct LlCombineArgs {
  LlOperation op;
  // Send
  Address y;        // [E_l, rows, hidden] contiguous, in any memory of this rank. Rows of pairs not named are not read
  Address ids;      // [T,K] contiguous, of this rank's tokens
  Address weights;  // [T,K] contiguous: f64 for f64 elements, else f32; or 0: 1 for every pair
  Address plan;     // the plan of the dispatch
  int64_t hidden;
  int32_t id_bytes;  // 4 or 8
  int32_t element;
  // Receive
  Address out;   // [T, hidden] contiguous
  Address bias;  // [T, hidden] contiguous or 0
};

EP_HD LlState& ll_state_of(const LlOperation& op) { return *at<LlState>(op.state); }

// Ranks of all nodes, the place of one, and the rank at a place.
EP_HD int ll_num_ranks(const LlOperation& op) { return op.comm.num_ranks * op.shape.num_nodes; }
EP_HD int ll_place_of(const LlOperation& op, int rank) {
  return op.places == 0 ? rank : at<const int32_t>(op.places)[rank];
}
EP_HD int ll_rank_at(const LlOperation& op, int place) {
  return op.places == 0 ? place : at<const int32_t>(op.places)[ll_num_ranks(op) + place];
}
// The rank of the group that has a local rank of this node.
EP_HD int ll_rank_here(const LlOperation& op, int local_rank) {
  return ll_rank_at(op, op.node * op.comm.num_ranks + local_rank);
}
// How faults name a rank of another node: by an index behind the ranks of this one.
EP_HD int ll_index_of(const LlOperation& op, int rank) { return op.comm.num_ranks + rank; }

// One rank's block with its parts named. `sender`: the rank that writes there.
struct LlBlock {
  Address base;
  LlLayout lay;
  int ranks;
  LlShape shape;

  EP_HD int64_t place(int kind, int parity, int sender) const {
    return (static_cast<int64_t>(kind) * kLlParities + parity) * ranks + sender;
  }
  EP_HD uint64_t* consumed(int kind, int parity, int peer) const {
    return at<uint64_t>(base, lay.consumed) + place(kind, parity, peer);
  }
  EP_HD uint32_t* waiting(int rank) const { return at<uint32_t>(base, lay.waiting) + rank; }
  EP_HD LlBell& bell() const { return *at<LlBell>(base, lay.bell); }
  EP_HD uint64_t* flag(int kind, int parity, int sender, int group) const {
    return at<uint64_t>(base, lay.flag) + place(kind, parity, sender) * kLlMaxGroups + group;
  }
  EP_HD LlWord* ids(int parity, int source) const {
    return at<LlWord>(base, lay.ids) + place(0, parity, source) * lay.id_words;
  }
  EP_HD LlWord* weights(int parity, int owner) const {
    return at<LlWord>(base, lay.weights) + place(0, parity, owner) * lay.weight_words;
  }
  EP_HD LlWord* weights_of_token(int parity, int owner, int token) const {
    return weights(parity, owner) + kLlHeaderWords + token * lay.token_words;
  }
  EP_HD LlWord* pair_words(int parity, int pair) const {
    return at<LlWord>(base, lay.pair_words) + (int64_t{parity} * kLlFewPairs + pair) * lay.words_per_row;
  }
  EP_HD char* slot(int kind, int parity, int sender, int token) const {
    return at<char>(base, lay.slots + (place(kind, parity, sender) * shape.max_tokens + token) * shape.slot_bytes);
  }
};
EP_HD LlBlock ll_block(const LlOperation& op, int rank) {
  return LlBlock{control_at(op.comm, rank), ll_layout(op.comm.num_ranks, op.shape), op.comm.num_ranks, op.shape};
}

// The parts of a rank's block behind LlBlock. A reader of another rank's legs uses the same `slot`.
struct LlLegs {
  Address base;
  LlLegsLayout lay;
  int ranks, origins;
  LlShape shape;

  EP_HD char* leg(int kind, int direction, int slot, int origin) const {
    return at<char>(base, ll_leg_offset(lay, shape, kind, direction, slot, origin));
  }
  EP_HD int64_t place(int parity, int rank, int origin) const {
    return (static_cast<int64_t>(parity) * ranks + rank) * origins + origin;
  }
  EP_HD uint64_t* arrived(int kind, int parity, int forwarder, int origin) const {
    return at<uint64_t>(base, lay.arrived) + place(kind * kLlParities + parity, forwarder, origin);
  }
  EP_HD uint64_t* stored(int parity, int holder, int origin) const {
    return at<uint64_t>(base, lay.stored) + place(parity, holder, origin);
  }
  EP_HD uint64_t* tag(int parity, int holder, int origin, int row) const {
    return at<uint64_t>(base, lay.tags) + place(parity, holder, origin) * shape.max_tokens + row;
  }
  EP_HD char* partial(int parity, int holder, int origin, int row) const {
    const int64_t slot = place(parity, holder, origin) * shape.max_tokens + row;
    return at<char>(base, lay.partials + slot * shape.slot_bytes);
  }
};
EP_HD LlLegs ll_legs(const LlOperation& op, int rank) {
  return LlLegs{control_at(op.comm, rank), ll_legs_layout(op.comm.num_ranks, op.shape), op.comm.num_ranks,
                op.shape.num_nodes - 1, op.shape};
}

// A plan with its parts named.
struct LlPlan {
  int64_t* layout_range;
  int32_t *src_tokens, *src_rows, *src_info, *rows, *sent_rows;
  int64_t expert_rows;  // R * T_max
};
EP_HD LlPlan ll_plan_of(const LlOperation& op, Address plan) {
  const int64_t ranks = ll_num_ranks(op), most = op.header.max_tokens;
  const LlPlanLayout lay = ll_plan_layout(ranks, op.shape.num_nodes, local_experts(op.comm), most, op.header.topk);
  int32_t* words = at<int32_t>(plan);
  return LlPlan{at<int64_t>(plan, 4 * lay.layout_range),
                words + lay.src_tokens,
                words + lay.src_rows,
                words + lay.src_info,
                words + lay.rows,
                words + lay.sent_rows,
                ranks * most};
}

// The index of the first compared field in which two headers differ, or -1.
EP_HD int ll_header_mismatch(const LlHeader& mine, const LlHeader& theirs) {
  const int32_t* a = reinterpret_cast<const int32_t*>(&mine);
  const int32_t* b = reinterpret_cast<const int32_t*>(&theirs);
  for (int field = 0; field < kLlComparedFields; ++field)
    if (a[field] != b[field]) return field;
  return -1;
}

// Combine: whether a rank with T tokens uses the path for few pairs. On that path several holders write the words of a
// pair, in one operation each. With shrink, a masked holder may write after the others have gone on. So with shrink no
// rank uses that path, and every holder writes to places of its own. Nor does a rank over several nodes, where rows of
// other nodes are summed there.
EP_HD bool ll_has_few_pairs(const LlOperation& op, int num_tokens) {
  return op.shrink == 0 && op.shape.num_nodes == 1 && num_tokens * op.header.topk <= kLlFewPairs;
}
// Whether all owners have few pairs, for any number of tokens up to T_max.
EP_HD bool ll_always_few_pairs(const LlOperation& op) { return ll_has_few_pairs(op, op.header.max_tokens); }

}  // namespace ep
