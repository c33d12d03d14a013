// Low latency over several nodes: the layout of the memory and of the messages, for host and device.
//
// A leg is one message between two ranks of a rail, which have the same local rank on two nodes. An operation sends at
// most one leg of a kind to each other node:
//
//   rows     dispatch: each token that has an expert on the node, once, with the number of pairs for each expert there
//   weights  combine: the weights of each of these tokens
//   sums     combine: the sum of each of these tokens' rows, back to the owner of the tokens
//
// Shapes: N nodes of G ranks, R = N * G, T tokens of one rank, T_max most tokens of a rank in a call, K experts per
// token, E experts, E_n = E / N on each node. An origin is a node that legs come from: O = N - 1 of them, in the order
// of nodes without the own one. A rank that legs come to is the forwarder of their tokens. In a leg, experts are
// numbered within its node.
//
// Dispatch. The sender computes every position: a row carries, beside the token and its expert ids, the position of
// each pair among the sender's pairs for that expert. Legs land in peer memory of the forwarder, which checks their
// headers and signals to the ranks of its node. Each rank reads the counts and its rows there. Its output row is the
// sum of the counts of all sources before, in the order of ranks, and the position.
//
// Combine. A holder of experts reads the weights at the forwarder. It sums the rows of each token in the order of k, in
// float32 (float64 for float64 rows), rounds once, and stores this partial row into the forwarder's slot [holder]
// [origin][row of the leg], with the epoch as its tag. When it has stored all rows of a leg, it signals. The forwarder
// adds the partial rows in the order of local ranks, rounds once, and sends the sums. The owner adds, in the order of
// nodes, these sums and, in its own node's place, the partial rows of its node, then the bias, and rounds once.
//
// Reuse. Legs, signals, tags and slots exist twice, and all of an operation use the same entry of the two: legs by
// LlOperation::slot, which the host knows, the others by the parity of the epoch. The consumed words of low_latency.h
// hold for what ranks of the node read. The host begins to receive legs after the send half, which has waited for these
// words. So nothing lands that is still read. Both ends of a leg have the same epoch, which its header carries.
#pragma once
#include "common/low_latency.h"

namespace ep {

enum LlLeg : int32_t { kLlRows = 0, kLlWeights = 1, kLlSums = 2 };
constexpr int kLlLegs = 3;
enum LlDirection : int32_t { kLlOut = 0, kLlIn = 1 };

struct LlLegHeader {
  LlHeader header;
  uint64_t epoch;
  int32_t leg;  // LlLeg
  int32_t num_rows;
};
static_assert(sizeof(LlLegHeader) == 64, "rows begin at a multiple of 16 bytes");

// A leg: [LlLegHeader | rows: int16 counts[E_n] | rows]. All strides come from the header, which both ends compare.
// A row of the kind `rows` is [int32 token | int16 expert ids[K], -1: not on the node | int16 positions[K] | image].
// Weights are as in the words of low_latency.h.
struct LlLegLayout {
  int64_t rows;       // the first row
  int64_t row_bytes;  // from one row to the next
  int64_t image;      // in a row of the kind `rows`
  EP_HD constexpr int64_t bytes(int64_t num_rows) const { return rows + num_rows * row_bytes; }
};
constexpr int64_t kLlRowIds = 4;  // the ids in a row
EP_HD constexpr LlLegLayout ll_leg_layout(int32_t leg, int64_t node_experts, int64_t K, int64_t weight_bytes,
                                          int64_t image_bytes) {
  const int64_t rows = static_cast<int64_t>(sizeof(LlLegHeader)), image = align_up(kLlRowIds + 4 * K, kRowAlign);
  if (leg == kLlRows)
    return {rows + align_up(2 * node_experts, kRowAlign), image + align_up(image_bytes, kRowAlign), image};
  return {rows, leg == kLlWeights ? K * weight_bytes : align_up(image_bytes, kRowAlign), 0};
}
EP_HD constexpr LlLegLayout ll_leg_layout(int32_t leg, const LlHeader& header, const LlShape& shape) {
  return ll_leg_layout(leg, shape.node_experts, header.topk, header.weight_bytes,
                       leg == kLlRows ? ll_image_bytes(header.row_bytes, header.scale_bytes) : header.row_bytes);
}

// The part of a rank's block behind LlLayout. It is empty on one node.
struct LlLegsLayout {
  int64_t leg_bytes[kLlLegs];  // room for one
  int64_t legs[kLlLegs];       // [2 directions][2 entries][O origins]
  int64_t arrived;             // u64 [2 kinds][2 parities][G forwarders][O]: epoch of the leg that is at a forwarder
  int64_t stored;              // u64 [2 parities][G holders][O]: epoch of the leg whose partial rows are all there
  int64_t tags;                // u64 [2 parities][G holders][O][T_max]: epoch of the partial row
  int64_t partials;            // [2 parities][G holders][O][T_max] slots
  int64_t bytes;               // of the block
};
EP_HD constexpr LlLegsLayout ll_legs_layout(int G, const LlShape& shape) {
  LlLegsLayout at{};
  at.bytes = ll_layout(G, shape).bytes;
  if (shape.num_nodes == 1) return at;
  const int64_t origins = shape.num_nodes - 1, pairs = static_cast<int64_t>(kLlParities) * G * origins;
  for (int leg = 0; leg < kLlLegs; ++leg) {
    const LlLegLayout widest = ll_leg_layout(leg, shape.node_experts, shape.max_topk, 8, shape.slot_bytes);
    at.leg_bytes[leg] = align_up(widest.bytes(shape.max_tokens), kSlotAlign);
    at.legs[leg] = at.bytes;
    at.bytes += 2 * kLlParities * origins * at.leg_bytes[leg];
  }
  at.arrived = at.bytes;
  at.stored = align_up(at.arrived + 8 * kLlKinds * pairs, kSlotAlign);
  at.tags = align_up(at.stored + 8 * pairs, kSlotAlign);
  at.partials = align_up(at.tags + 8 * pairs * shape.max_tokens, kSlotAlign);
  at.bytes = at.partials + pairs * shape.max_tokens * shape.slot_bytes;
  return at;
}
// Returns the offset of a leg in a rank's block. slot: LlOperation::slot.
EP_HD constexpr int64_t ll_leg_offset(const LlLegsLayout& at, const LlShape& shape, int32_t leg, int32_t direction,
                                      int32_t slot, int32_t origin) {
  const int64_t place = (int64_t{direction} * kLlParities + slot % kLlParities) * (shape.num_nodes - 1) + origin;
  return at.legs[leg] + place * at.leg_bytes[leg];
}
// The number of a node among the others of `node`, and the node of such a number.
EP_HD constexpr int ll_origin_of(int node, int other) { return other < node ? other : other - 1; }
EP_HD constexpr int ll_node_of(int node, int origin) { return origin < node ? origin : origin + 1; }

}  // namespace ep
