// The send half of low-latency combine: the weights that a rank sends as the owner of tokens, and the partial rows that
// it sends as a holder of experts. common/low_latency.h has the layout and the rules.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/moe/ll_legs.h"
#include "cpu/moe/ll_logfmt.h"

namespace ep::cpu {

inline int64_t id_of(const LlCombineArgs& args, int64_t pair) {
  return args.id_bytes == 8 ? at<int64_t>(args.ids)[pair] : at<int32_t>(args.ids)[pair];
}

// -- as an owner ---------------------------------------------------------------------------------------------------

// The weights of one token as they travel.
template <class S>
void travelling_weights(const LlCombineArgs& args, int64_t token, S* weights) {
  const int K = args.op.header.topk;
  for (int k = 0; k < K; ++k) {
    const int64_t pair = token * K + k;
    weights[k] = args.weights == 0 ? S(1) : at<S>(args.weights)[pair];
    if (std::isnan(weights[k])) weights[k] = std::numeric_limits<S>::quiet_NaN();
    if (id_of(args, pair) < 0) std::memset(weights + k, 0xFF, sizeof(S));
  }
}

template <class S>
bool is_named(const S& weight) {
  const char* bytes = reinterpret_cast<const char*>(&weight);
  return !std::all_of(bytes, bytes + sizeof(S), [](char byte) { return byte == '\xFF'; });
}

template <class S>
Wait send_weights(const LlRun& ll, const LlCombineArgs& args, int peer) {
  const Wait found = ll_wait_consumed(ll, peer);
  if (found != Wait::kThere) return found;
  const Comm& comm = ll.op.comm;
  const LlHeader header = ll_own_header(ll);
  const int K = header.topk, T = ll_has_few_pairs(ll.op, header.num_tokens) ? 0 : header.num_tokens;
  const LlBlock to = ll.block(peer);
  LlWord* words = to.weights(ll.parity, comm.rank);
  ll_write_words(ll, words, &header, sizeof(header));
  S weights[kMaxTopk];
  for (int token = 0; token < T; ++token) {
    travelling_weights(args, token, weights);
    ll_write_words(ll, to.weights_of_token(ll.parity, comm.rank, token), weights, K * sizeof(S));
  }
  ll_refresh(ll, words, to.lay.weight_words, [&](int64_t index) {
    const int64_t place = index - kLlHeaderWords;
    return place < 0 || (place / to.lay.token_words < T &&
                         place % to.lay.token_words < ll_weight_words(K, static_cast<int64_t>(sizeof(S))));
  });
  return Wait::kThere;
}

// Writes the legs with the weights of the tokens that the dispatch has sent to other nodes.
template <class S>
bool write_weight_legs(const LlRun& ll, const LlCombineArgs& args, const LlPlan& plan) {
  const LlHeader& header = ll.op.header;
  const LlLegs own = ll_legs(ll.op, ll.op.comm.rank);
  const int64_t first = ll_leg_layout(kLlWeights, header, ll.op.shape).rows;
  for (int origin = 0; origin < own.origins; ++origin) {
    char* leg = own.leg(kLlWeights, kLlOut, ll.op.slot, origin);
    int32_t& rows = ll_begin_leg(ll, kLlWeights, leg).num_rows;
    for (int token = 0; token < header.num_tokens; ++token) {
      const int32_t row = plan.sent_rows[token * ll.op.shape.num_nodes + ll_node_of(ll.op.node, origin)];
      if (row < 0) continue;
      if (row != rows++) return fail(ll.op.comm, kBadHandle, ll.run.step, ll.op.comm.rank, token, rows - 1, row);
      travelling_weights(args, token, reinterpret_cast<S*>(leg + first) + int64_t{row} * header.topk);
    }
  }
  return true;
}

// The word behind a pair's row.
inline LlWord* word_of_pair(const LlBlock& block, int parity, int64_t pair) {
  return block.pair_words(parity, static_cast<int>(pair)) + block.lay.words_per_row - 1;
}

// Whether the rows of a holder's pairs stay where they are: a call with both halves reads this rank's own rows from y.
inline bool stays(const LlRun& ll, int holder) {
  return holder == ll.op.comm.rank && ll.op.phases == (kLlSend | kLlReceive);
}

// Refreshes the word of one of this rank's own pairs, which several holders write.
inline void refresh_pairs(const LlRun& ll, const LlCombineArgs& args) {
  const LlHeader& header = ll.op.header;
  const int few = ll_has_few_pairs(ll.op, header.num_tokens) ? header.num_tokens * header.topk : 0;
  const int64_t pair = ll_refreshed(ll.run.epoch, kLlFewPairs), id = pair < few ? id_of(args, pair) : -1;
  const int holder = static_cast<int>(id / local_experts(ll.op.comm));
  if (id < 0 || ll.masked(holder) || stays(ll, holder))
    ll_write_words(ll, word_of_pair(ll.own(), ll.parity, pair), nullptr, 0);
}

// -- as a holder ---------------------------------------------------------------------------------------------------

// The rows and partial rows for the owners' tokens, whose element type is T.
template <class T>
class Holder {
  using S = typename Sum<T>::type;

 public:
  Holder(const LlRun& ll, const LlCombineArgs& args)
      : ll_(ll),
        args_(args),
        plan_(ll_plan_of(ll.op, args.plan)),
        all_rows_(local_experts(ll.op.comm) * plan_.expert_rows) {}

  // For an owner with few pairs: sends the rows, and waits for nothing.
  bool send_rows(int owner) {
    const LlBlock to = ll_.block(owner);
    if (ll_.masked(owner) || stays(ll_, owner)) return true;
    const int pairs = plan_.src_tokens[owner] * ll_.op.header.topk;
    const int32_t* rows = rows_of(ll_rank_here(ll_.op, owner), 0);
    for (int pair = 0; pair < pairs; ++pair) {
      if (rows[pair] < 0) continue;
      if (!check_row(pair / ll_.op.header.topk, rows[pair])) return false;
      const T* row = at<const T>(args_.y) + rows[pair] * args_.hidden;
      std::memcpy(to.pair_words(ll_.parity, pair), row, ll_.op.header.row_bytes);
      ll_write_words(ll_, word_of_pair(to, ll_.parity, pair), nullptr, 0);
    }
    ll_ring(ll_, owner);
    return true;
  }

  // Waits for the owner's header. If the owner has many pairs, then sends the partial rows.
  bool reduce_for(int owner) {
    const Comm& comm = ll_.op.comm;
    const LlBlock own = ll_.own(), to = ll_.block(owner);
    LlHeader header;
    const Wait opened = ll_open(ll_, owner, own.weights(ll_.parity, owner), &header);
    if (opened != Wait::kThere) return opened == Wait::kMasked;
    const int rank = ll_rank_here(ll_.op, owner), T_owner = plan_.src_tokens[rank];
    if (header.num_tokens != T_owner)
      return fail(comm, kDisagree, ll_.run.step, owner, kLlComparedFields, T_owner, header.num_tokens);
    if (ll_has_few_pairs(ll_.op, T_owner)) return true;
    const int K = header.topk, size = ll_group_tokens(T_owner);
    for (int group = 0; group < ll_groups(T_owner); ++group) {
      bool holds = false;
      for (int token = group * size; token < std::min(T_owner, (group + 1) * size); ++token) {
        const int32_t* rows = rows_of(rank, token);
        if (std::all_of(rows, rows + K, [](int32_t row) { return row < 0; })) continue;
        holds = true;
        const Wait found = reduce_token(owner, token, rows, to);
        if (found != Wait::kThere) return found == Wait::kMasked;
      }
      if (holds) signal(to.flag(ll_.kind, ll_.parity, comm.rank, group), ll_.run.epoch);
    }
    ll_ring(ll_, owner);
    return true;
  }

  // Waits for a leg with weights, and stores the partial rows of its tokens at the forwarder.
  bool reduce_leg(int forwarder, int origin) {
    const LlOperation& op = ll_.op;
    const int K = op.header.topk, place = ll_node_of(op.node, origin) * op.comm.num_ranks + forwarder;
    const int rank = ll_rank_at(op, place), num_rows = plan_.src_rows[rank];
    if (!ll_wait_leg(ll_, forwarder, origin)) return false;
    const LlLegs to = ll_legs(op, forwarder);
    const char* leg = to.leg(kLlWeights, kLlIn, op.slot, origin);
    if (!ll_check_leg(ll_, kLlWeights, leg, rank, plan_.src_tokens[rank], num_rows)) return false;
    const S* weights = reinterpret_cast<const S*>(leg + ll_leg_layout(kLlWeights, op.header, op.shape).rows);
    for (int row = 0; row < num_rows; ++row) {
      if (!choose(row, rows_of(rank, row), weights + int64_t{row} * K)) return false;
      if (count_ == 0) continue;
      reduce(reinterpret_cast<T*>(to.partial(ll_.parity, op.comm.rank, origin, row)));
      *to.tag(ll_.parity, op.comm.rank, origin, row) = ll_.run.epoch;
    }
    signal(to.stored(ll_.parity, op.comm.rank, origin), ll_.run.epoch);
    ll_ring(ll_, forwarder);
    return true;
  }

 private:
  const int32_t* rows_of(int rank, int token) const {
    return plan_.rows + (static_cast<int64_t>(rank) * ll_.op.header.max_tokens + token) * ll_.op.header.topk;
  }
  bool check_row(int token, int64_t row) const {
    const Comm& comm = ll_.op.comm;
    return row < all_rows_ || fail(comm, kBadHandle, ll_.run.step, comm.rank, token, all_rows_, row);
  }

  // Lists the rows of a token's pairs that are here and that its owner names, and their weights.
  bool choose(int token, const int32_t* rows, const S* weights) {
    count_ = 0;
    for (int k = 0; k < ll_.op.header.topk; ++k) {
      if (rows[k] < 0 || !is_named(weights[k])) continue;
      if (!check_row(token, rows[k])) return false;
      row_[count_] = at<const T>(args_.y) + rows[k] * args_.hidden;
      factor_[count_++] = weights[k];
    }
    return true;
  }

  Wait reduce_token(int owner, int token, const int32_t* rows, const LlBlock& to) {
    const Comm& comm = ll_.op.comm;
    const LlHeader& header = ll_.op.header;
    S weights[kMaxTopk];
    const LlWord* words = ll_.own().weights_of_token(ll_.parity, owner, token);
    const Wait found = ll_wait_words(ll_, owner, words, weights, header.topk * sizeof(S));
    if (found != Wait::kThere) return found;
    if (!choose(token, rows, weights)) return Wait::kFault;
    if (count_ == 0) return Wait::kThere;  // the owner names no pair here, and reads no partial row
    char* slot = to.slot(ll_.kind, ll_.parity, comm.rank, token);
    if (header.format == kLlLogfmt)
      reduce_coded(slot);
    else
      reduce(reinterpret_cast<T*>(slot));
    return Wait::kThere;
  }

  void sum_block(int64_t begin, int elements, S* sum) const {
    std::fill_n(sum, elements, S(0));
    for (int i = 0; i < count_; ++i) accumulate<T>(sum, row_[i] + begin, elements, factor_[i]);
  }

  void reduce(T* out) const {
    S sum[kSumBlock];
    for (int64_t begin = 0; begin < args_.hidden; begin += kSumBlock) {
      const int elements = static_cast<int>(std::min<int64_t>(kSumBlock, args_.hidden - begin));
      sum_block(begin, elements, sum);
      narrow_all(sum, elements, out + begin);
    }
  }

  void reduce_coded(char* slot) const {
    if constexpr (std::is_same_v<T, BFloat16>) {
      float sum[kLlLogfmtGroup];
      LogfmtScale* scales = reinterpret_cast<LogfmtScale*>(slot + args_.hidden * sizeof(T));
      for (int64_t begin = 0; begin < args_.hidden; begin += kLlLogfmtGroup) {
        sum_block(begin, kLlLogfmtGroup, sum);
        encode_group(sum, slot + begin * sizeof(T), scales + begin / kLlLogfmtGroup);
      }
    }
  }

  const LlRun& ll_;
  const LlCombineArgs& args_;
  const LlPlan plan_;
  const int64_t all_rows_;
  int count_ = 0;
  const T* row_[kMaxTopk];
  S factor_[kMaxTopk];
};

}  // namespace ep::cpu
