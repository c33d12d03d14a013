// The receive half of low-latency combine: the sums of this rank's tokens. common/low_latency.h has the layout and the
// rules.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/moe/ll_combine_send.h"

namespace ep::cpu {

// The sums of this rank's tokens, whose element type is T.
template <class T>
class Owner {
  using S = typename Sum<T>::type;

 public:
  Owner(const LlRun& ll, const LlCombineArgs& args)
      : ll_(ll),
        args_(args),
        own_(ll.own()),
        T_(ll.op.header.num_tokens),
        few_(ll_has_few_pairs(ll.op, T_)),
        plan_(ll_plan_of(ll.op, args.plan)),
        sum_(args.hidden),
        places_(ll.op.header.topk),
        legs_(ll_legs(ll.op, ll.op.comm.rank)),
        lay_(ll_leg_layout(kLlSums, ll.op.header, ll.op.shape)) {}

  bool run() {
    if (!check_sums()) return false;
    for (int token = 0; token < T_; ++token) {
      std::fill(sum_.begin(), sum_.end(), S(0));
      if (!(few_ ? add_pairs(token) : add_holders(token))) return false;
      if (args_.bias != 0) accumulate<T>(sum_.data(), at<const T>(args_.bias) + token * args_.hidden, args_.hidden);
      T* out = at<T>(args_.out) + token * args_.hidden;
      narrow_all(sum_.data(), static_cast<int>(args_.hidden), out);
      if (token == 0 && !hold_at_gate(ll_.run)) return false;
    }
    return true;
  }

 private:
  // Adds the rows of the token's pairs that are named. A masked holder adds nothing. False after a fault.
  bool add_pairs(int token) {
    const int K = ll_.op.header.topk, per_rank = local_experts(ll_.op.comm);
    for (int pair = token * K; pair < (token + 1) * K; ++pair) {
      const int64_t id = id_of(args_, pair);
      if (id < 0) continue;
      const int holder = static_cast<int>(id / per_rank);
      const T* row = nullptr;
      const Wait found = stays(ll_, holder) ? find_row(pair, &row) : wait_for_row(holder, pair, &row);
      if (found == Wait::kFault) return false;
      const S weight = args_.weights == 0 ? S(1) : at<S>(args_.weights)[pair];
      if (found == Wait::kThere) accumulate<T>(sum_.data(), row, args_.hidden, weight);
    }
    return true;
  }
  Wait wait_for_row(int holder, int pair, const T** row) const {
    char nothing[kLlWordBytes];
    *row = reinterpret_cast<const T*>(own_.pair_words(ll_.parity, pair));
    return ll_wait_words(ll_, holder, word_of_pair(own_, ll_.parity, pair), nothing, sizeof(nothing));
  }
  // The row of a pair whose expert is here.
  Wait find_row(int pair, const T** row) const {
    const Comm& comm = ll_.op.comm;
    const LlHeader& header = ll_.op.header;
    const int64_t rows = local_experts(comm) * plan_.expert_rows;
    const int32_t found = plan_.rows[int64_t{ll_rank_here(ll_.op, comm.rank)} * header.max_tokens * header.topk + pair];
    if (!(found >= 0 && found < rows)) {
      fail(comm, kBadHandle, ll_.run.step, comm.rank, pair / header.topk, rows, found);
      return Wait::kFault;
    }
    *row = at<const T>(args_.y) + found * args_.hidden;
    return Wait::kThere;
  }
  // Adds, in the order of nodes, the sums of other nodes and the partial rows of this one.
  bool add_holders(int token) {
    find_places(token);
    for (int node = 0; node < ll_.op.shape.num_nodes; ++node) {
      if (node != ll_.op.node) {
        if (names(node)) add_sum(token, node);
        continue;
      }
      for (int holder = 0; holder < ll_.op.comm.num_ranks; ++holder)
        if (names(node, holder) && !add(token, holder)) return false;
    }
    return true;
  }
  // Finds where the experts are that the token names now; -1: a pair is not named.
  void find_places(int64_t token) {
    const int K = ll_.op.header.topk, per_rank = local_experts(ll_.op.comm);
    for (int k = 0; k < K; ++k) {
      const int64_t id = id_of(args_, token * K + k);
      places_[k] = id < 0 ? -1 : ll_place_of(ll_.op, static_cast<int>(id / per_rank));
    }
  }
  // Whether the token names an expert of a node, or of a rank of it.
  bool names(int node, int local_rank = -1) const {
    const int G = ll_.op.comm.num_ranks;
    return std::any_of(places_.begin(), places_.end(), [=](int place) {
      return place >= 0 && place / G == node && (local_rank < 0 || place % G == local_rank);
    });
  }

  // Checks the legs with sums against the rows that the dispatch has sent.
  bool check_sums() const {
    const LlOperation& op = ll_.op;
    for (int origin = 0; origin < legs_.origins; ++origin) {
      const int node = ll_node_of(op.node, origin), rank = ll_rank_at(op, node * op.comm.num_ranks + op.comm.rank);
      int sent = 0;
      for (int token = 0; token < T_; ++token) {
        const int32_t row = plan_.sent_rows[token * op.shape.num_nodes + node];
        if (row >= 0 && row != sent++)
          return fail(op.comm, kBadHandle, ll_.run.step, op.comm.rank, token, sent - 1, row);
      }
      const char* leg = legs_.leg(kLlSums, kLlIn, op.slot, origin);
      if (!ll_check_leg(ll_, kLlSums, leg, rank, plan_.src_tokens[rank], sent)) return false;
    }
    return true;
  }
  void add_sum(int token, int node) {
    const LlOperation& op = ll_.op;
    const int32_t row = plan_.sent_rows[token * op.shape.num_nodes + node];
    if (row < 0) return;  // the owner names a pair that the dispatch did not have
    const char* leg = legs_.leg(kLlSums, kLlIn, op.slot, ll_origin_of(op.node, node));
    accumulate<T>(sum_.data(), reinterpret_cast<const T*>(leg + lay_.rows + row * lay_.row_bytes),
                  static_cast<int>(args_.hidden));
  }

  // Adds the partial row of a holder. False after a fault; a masked holder adds nothing.
  bool add(int token, int holder) {
    const char* row = own_.slot(ll_.kind, ll_.parity, holder, token);
    const Wait found = ll_wait_flag(ll_, holder, own_.flag(ll_.kind, ll_.parity, holder, token / ll_group_tokens(T_)));
    if (found != Wait::kThere) return found == Wait::kMasked;
    if (ll_.op.header.format == kLlLogfmt)
      add_coded(row);
    else
      accumulate<T>(sum_.data(), reinterpret_cast<const T*>(row), args_.hidden);
    return true;
  }

  void add_coded(const char* row) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const LogfmtScale* scales = reinterpret_cast<const LogfmtScale*>(row + args_.hidden * sizeof(T));
      for (int64_t begin = 0; begin < args_.hidden; begin += kLlLogfmtGroup)
        add_group(row + begin * sizeof(T), scales[begin / kLlLogfmtGroup], sum_.data() + begin);
    }
  }

  const LlRun& ll_;
  const LlCombineArgs& args_;
  const LlBlock own_;
  const int T_;
  const bool few_;
  const LlPlan plan_;
  std::vector<S> sum_;
  std::vector<int> places_;  // of the token's experts
  const LlLegs legs_;
  const LlLegLayout lay_;  // of legs with sums
};

}  // namespace ep::cpu
