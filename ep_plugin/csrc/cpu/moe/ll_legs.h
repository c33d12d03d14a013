// What low-latency kernels of CPUs do with legs, the messages between nodes. common/low_latency_legs.h has the layout
// and the protocol. On one node there are no legs, and these do nothing.
#pragma once
#include <vector>

#include "cpu/moe/low_latency.h"

namespace ep::cpu {

// The experts of this rank's tokens, as ranks of their nodes number them. On one node the ids stay as they are.
class LlExperts {
 public:
  // ids: [T,K] of all nodes.
  LlExperts(const LlRun& ll, std::vector<int16_t> ids);

  // The ids of pairs on this node, as numbers within it. Others are -1.
  const std::vector<int16_t>& here() const { return here_; }
  // Several nodes: the node of a pair, -1: the pair is dropped; and its id within that node.
  int node_of(int64_t pair) const { return node_[pair]; }
  int16_t in_node(int64_t pair) const { return in_node_[pair]; }

 private:
  std::vector<int16_t> here_, in_node_;
  std::vector<int32_t> node_;
};

// Begins a leg of this operation. The caller sets num_rows when it knows it.
LlLegHeader& ll_begin_leg(const LlRun& ll, LlLeg leg, char* at);

// The legs with this rank's rows, by origin of the node that they go to.
class LlRowLegs {
 public:
  // Writes LlPlan::sent_rows, too.
  LlRowLegs(const LlRun& ll, const LlPlan& plan, const LlExperts& experts);
  // Appends a token to the legs of all nodes that have one of its experts. image(): returns the token's image. Call it
  // with each token in turn.
  template <class Image>
  void add(int token, const Image& image) {
    for (int origin = 0; origin < origins_; ++origin)
      if (goes_to(token, origin)) append(token, origin, image());
  }

 private:
  bool goes_to(int token, int origin) const;
  void append(int token, int origin, const char* image);

  const LlRun& ll_;
  const LlPlan& plan_;
  const LlExperts& experts_;
  const int origins_;
  const LlLegLayout lay_;
  const int64_t image_bytes_;
  std::vector<char*> legs_;
};

// A leg with rows of another node, as the ranks of this node read it at its forwarder.
struct LlRowLeg {
  const char* at = nullptr;  // null: there is none
  LlLegLayout lay{};
  int topk = 0;
  int num_rows = 0, num_tokens = 0;  // as ll_check_leg() has found them

  int count(int expert) const { return reinterpret_cast<const uint16_t*>(at + sizeof(LlLegHeader))[expert]; }
  const char* row(int row) const { return at + lay.rows + row * lay.row_bytes; }
  int32_t token(int index) const { return *reinterpret_cast<const int32_t*>(row(index)); }
  const int16_t* ids(int index) const { return reinterpret_cast<const int16_t*>(row(index) + kLlRowIds); }
  const int16_t* positions(int index) const { return ids(index) + topk; }
  const char* image(int index) const { return row(index) + lay.image; }
};

// Checks the legs of a kind that have come to this rank, and signals them to the ranks of its node. plan: of the
// dispatch, in a combine; else null. False after a fault.
bool ll_relay(const LlRun& ll, LlLeg leg, const LlPlan* plan);
// Waits until a leg is at a forwarder of this node.
bool ll_wait_leg(const LlRun& ll, int forwarder, int origin);
// Checks the header of a leg that `rank` has sent against this rank's. tokens, rows: T of the rank and the rows of the
// leg, by the dispatch; -1: not known, so up to T_max. False after a fault.
bool ll_check_leg(const LlRun& ll, LlLeg leg, const char* at, int rank, int tokens, int rows);

}  // namespace ep::cpu
