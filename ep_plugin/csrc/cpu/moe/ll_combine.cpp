// Low-latency combine: owners send the weights of their tokens to all ranks; holders sum rows to partial rows and store
// them in the owners' slots; owners add the partial rows. An owner with few pairs gets their rows and sums them itself.
// common/low_latency.h has the layout and the rules. The file is long because it has both the owner and the holder:
// each reads the words that the other writes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/logfmt.h"
#include "cpu/core/sums.h"
#include "cpu/moe/kernels.h"
#include "cpu/moe/ll_legs.h"

namespace ep::cpu {

namespace {

constexpr int kCodeBytes = kLlLogfmtGroup;                      // the lower 8 bits of a group's codes
constexpr int kGroupBytes = kLlLogfmtGroup * sizeof(BFloat16);  // a group's place in a slot

int64_t id_of(const LlCombineArgs& args, int64_t pair) {
  return args.id_bytes == 8 ? at<int64_t>(args.ids)[pair] : at<int32_t>(args.ids)[pair];
}

// -- logfmt --------------------------------------------------------------------------------------------------------

void encode_group(const float* values, char* to, LogfmtScale* scale) {
  float amin = std::numeric_limits<float>::infinity(), amax = 0.0f;
  bool coded = true;
  for (int i = 0; i < kLlLogfmtGroup; ++i) {
    const float magnitude = std::fabs(values[i]);
    coded &= magnitude < 1.0f;  // false for NaN
    amax = std::max(amax, magnitude);
    if (magnitude != 0.0f) amin = std::min(amin, magnitude);
  }
  *scale = logfmt_scale(amin, amax, coded);
  if (!coded) {
    for (int i = 0; i < kLlLogfmtGroup; ++i) narrow(values[i], reinterpret_cast<BFloat16*>(to) + i);
    return;
  }
  uint8_t* low = reinterpret_cast<uint8_t*>(to);
  std::fill_n(low + kCodeBytes, kCodeBytes / 4, uint8_t{0});
  for (int i = 0; i < kLlLogfmtGroup; ++i) {
    const uint32_t code = logfmt_code(values[i], *scale);
    low[i] = static_cast<uint8_t>(code);
    low[kCodeBytes + i / 4] |= static_cast<uint8_t>(code >> 8 << (2 * (i % 4)));
  }
}

void add_group(const char* from, const LogfmtScale& scale, float* sum) {
  if (scale.step < 0.0f) return accumulate<BFloat16>(sum, reinterpret_cast<const BFloat16*>(from), kLlLogfmtGroup);
  const uint8_t* low = reinterpret_cast<const uint8_t*>(from);
  for (int i = 0; i < kLlLogfmtGroup; ++i)
    sum[i] += logfmt_value(low[i] | (low[kCodeBytes + i / 4] >> (2 * (i % 4)) & 3u) << 8, scale);
}

// -- send: as an owner ---------------------------------------------------------------------------------------------

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

bool check_ids(const LlRun& ll, const LlCombineArgs& args) {
  const Comm& comm = ll.op.comm;
  const int K = ll.op.header.topk, experts = comm.num_experts * ll.op.shape.num_nodes;
  for (int64_t pair = 0; pair < static_cast<int64_t>(ll.op.header.num_tokens) * K; ++pair)
    if (const int64_t id = id_of(args, pair); id < -1 || id >= experts)
      return fail(comm, kBadIds, ll.run.step, comm.rank, static_cast<int>(pair / K), experts, id);
  return true;
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
LlWord* word_of_pair(const LlBlock& block, int parity, int64_t pair) {
  return block.pair_words(parity, static_cast<int>(pair)) + block.lay.words_per_row - 1;
}

// Whether the rows of a holder's pairs stay where they are: a call with both halves reads this rank's own rows from y.
bool stays(const LlRun& ll, int holder) { return holder == ll.op.comm.rank && ll.op.phases == (kLlSend | kLlReceive); }

// Refreshes the word of one of this rank's own pairs, which several holders write.
void refresh_pairs(const LlRun& ll, const LlCombineArgs& args) {
  const LlHeader& header = ll.op.header;
  const int few = ll_has_few_pairs(ll.op, header.num_tokens) ? header.num_tokens * header.topk : 0;
  const int64_t pair = ll_refreshed(ll.run.epoch, kLlFewPairs), id = pair < few ? id_of(args, pair) : -1;
  const int holder = static_cast<int>(id / local_experts(ll.op.comm));
  if (id < 0 || ll.masked(holder) || stays(ll, holder))
    ll_write_words(ll, word_of_pair(ll.own(), ll.parity, pair), nullptr, 0);
}

// -- send: as a holder ---------------------------------------------------------------------------------------------

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
    if (!ll_check_leg(ll_, kLlWeights, leg, rank, num_rows, num_rows)) return false;
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

// Whether the plan's numbers of tokens are those of a dispatch.
bool check_plan(const LlRun& ll, const LlPlan& plan) {
  const Comm& comm = ll.op.comm;
  const int most = ll.op.header.max_tokens;
  for (int rank = 0; rank < ll_num_ranks(ll.op); ++rank)
    for (const int32_t tokens : {plan.src_tokens[rank], plan.src_rows[rank]})
      if (tokens < 0 || tokens > most) return fail(comm, kBadHandle, ll.run.step, comm.rank, rank, most, tokens);
  return true;
}

template <class T>
bool send_all(const LlRun& ll, const LlCombineArgs& args) {
  using S = typename Sum<T>::type;
  const Comm& comm = ll.op.comm;
  const int R = comm.num_ranks;
  const LlPlan plan = ll_plan_of(ll.op, args.plan);
  if (!check_ids(ll, args) || !check_plan(ll, plan)) return false;
  for (int step = 1; step <= R; ++step)
    if (send_weights<S>(ll, args, (comm.rank + step) % R) == Wait::kFault) return false;
  refresh_pairs(ll, args);
  ll_ring_all(ll);
  if (!write_weight_legs<S>(ll, args, plan) || !hold_at_gate(ll.run)) return false;
  Holder<T> holder(ll, args);
  for (int step = 1; step <= R; ++step) {
    const int owner = (comm.rank + step) % R, tokens = plan.src_tokens[ll_rank_here(ll.op, owner)];
    if (ll_has_few_pairs(ll.op, tokens) && !holder.send_rows(owner)) return false;
  }
  for (int step = 1; step <= R; ++step)
    if (!holder.reduce_for((comm.rank + step) % R)) return false;
  return true;
}

// -- forward -------------------------------------------------------------------------------------------------------

// Adds the partial rows that have come for the legs of this rank, and writes the legs with the sums.
template <class T>
bool add_partials(const LlRun& ll, const LlCombineArgs& args) {
  using S = typename Sum<T>::type;
  const LlOperation& op = ll.op;
  const int G = op.comm.num_ranks;
  const LlLegs own = ll_legs(op, op.comm.rank);
  const LlPlan plan = ll_plan_of(op, args.plan);
  const LlLegLayout lay = ll_leg_layout(kLlSums, op.header, op.shape);
  std::vector<S> sum(args.hidden);
  for (int origin = 0; origin < own.origins; ++origin) {
    for (int holder = 0; holder < G; ++holder)
      if (ll_wait_flag(ll, holder, own.stored(ll.parity, holder, origin)) != Wait::kThere) return false;
    char* leg = own.leg(kLlSums, kLlOut, op.slot, origin);
    int32_t& rows = ll_begin_leg(ll, kLlSums, leg).num_rows;
    rows = plan.src_rows[ll_rank_at(op, ll_node_of(op.node, origin) * G + op.comm.rank)];
    for (int row = 0; row < rows; ++row) {
      std::fill(sum.begin(), sum.end(), S(0));
      for (int holder = 0; holder < G; ++holder)
        if (*own.tag(ll.parity, holder, origin, row) == ll.run.epoch)
          accumulate<T>(sum.data(), reinterpret_cast<const T*>(own.partial(ll.parity, holder, origin, row)),
                        static_cast<int>(args.hidden));
      narrow_all(sum.data(), static_cast<int>(args.hidden), reinterpret_cast<T*>(leg + lay.rows + row * lay.row_bytes));
    }
  }
  return true;
}

template <class T>
bool forward_all(const LlRun& ll, const LlCombineArgs& args) {
  const Comm& comm = ll.op.comm;
  const LlPlan plan = ll_plan_of(ll.op, args.plan);
  if (!check_plan(ll, plan) || !ll_relay(ll, kLlWeights, plan.src_rows)) return false;
  Holder<T> holder(ll, args);
  for (int step = 1; step <= comm.num_ranks; ++step)
    for (int origin = 0; origin + 1 < ll.op.shape.num_nodes; ++origin)
      if (!holder.reduce_leg((comm.rank + step) % comm.num_ranks, origin)) return false;
  return add_partials<T>(ll, args);
}

// -- receive -------------------------------------------------------------------------------------------------------

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
        sum_(args.hidden) {}

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
    for (int node = 0; node < ll_.op.shape.num_nodes; ++node) {
      if (node != ll_.op.node) {
        if (names(token, node)) add_sum(token, node);
        continue;
      }
      for (int holder = 0; holder < ll_.op.comm.num_ranks; ++holder)
        if (names(token, node, holder) && !add(token, holder)) return false;
    }
    return true;
  }
  // Whether the token names a pair of a rank, or of any rank of the node, now.
  bool names(int64_t token, int node, int local_rank = -1) const {
    const int K = ll_.op.header.topk, G = ll_.op.comm.num_ranks, per_rank = local_experts(ll_.op.comm);
    for (int k = 0; k < K; ++k) {
      const int64_t id = id_of(args_, token * K + k);
      const int place = id < 0 ? -1 : ll_place_of(ll_.op, static_cast<int>(id / per_rank));
      if (place >= 0 && place / G == node && (local_rank < 0 || place % G == local_rank)) return true;
    }
    return false;
  }

  // Checks the legs with sums against the rows that the dispatch has sent.
  bool check_sums() const {
    const LlOperation& op = ll_.op;
    const LlLegs own = ll_legs(op, op.comm.rank);
    for (int origin = 0; origin < own.origins; ++origin) {
      const int node = ll_node_of(op.node, origin), rank = ll_rank_at(op, node * op.comm.num_ranks + op.comm.rank);
      int sent = 0;
      for (int token = 0; token < T_; ++token) {
        const int32_t row = plan_.sent_rows[token * op.shape.num_nodes + node];
        if (row >= 0 && row != sent++)
          return fail(op.comm, kBadHandle, ll_.run.step, op.comm.rank, token, sent - 1, row);
      }
      if (!ll_check_leg(ll_, kLlSums, own.leg(kLlSums, kLlIn, op.slot, origin), rank, sent, sent)) return false;
    }
    return true;
  }
  void add_sum(int token, int node) {
    const LlOperation& op = ll_.op;
    const int32_t row = plan_.sent_rows[token * op.shape.num_nodes + node];
    if (row < 0) return;  // the owner names a pair that the dispatch did not have
    const LlLegLayout lay = ll_leg_layout(kLlSums, op.header, op.shape);
    const char* leg = ll_legs(op, op.comm.rank).leg(kLlSums, kLlIn, op.slot, ll_origin_of(op.node, node));
    accumulate<T>(sum_.data(), reinterpret_cast<const T*>(leg + lay.rows + row * lay.row_bytes),
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
};

}  // namespace

void ll_combine(const LlCombineArgs& args) {
  const LlHeader& header = args.op.header;
  if (header.format == kLlLogfmt && (args.element != kBFloat16 || args.hidden % kLlLogfmtGroup != 0))
    throw std::invalid_argument("logfmt: expected bfloat16 rows of a multiple of " + std::to_string(kLlLogfmtGroup) +
                                " elements, got " + std::to_string(args.hidden));
  LlRun ll{args.op, kLlCombine, {args.op.comm, kNoStep, 0}, 0};
  bool done = true;
  with_element(args.element, [&](auto type) {
    using T = decltype(type);
    if ((args.op.phases & kLlSend) != 0 && ll_begin(args.op, kLlCombine, kLlSend, &ll) && send_all<T>(ll, args))
      ll_finish_send(ll);
    if ((args.op.phases & kLlForward) != 0 && ll_begin(args.op, kLlCombine, kLlForward, &ll)) forward_all<T>(ll, args);
    if ((args.op.phases & kLlReceive) == 0) return;
    done = ll_begin(args.op, kLlCombine, kLlReceive, &ll) && Owner<T>(ll, args).run();
    if (done) ll_finish_receive(ll);
  });
  if (!done) std::memset(at<char>(args.out), 0xFF, static_cast<int64_t>(header.num_tokens) * header.row_bytes);
}

}  // namespace ep::cpu
