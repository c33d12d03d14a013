// The send half of low-latency combine. ll_combine.cu describes roles and memory order.
#pragma once
#include "cuda/moe/ll_combine_few.cuh"

namespace ep::cuda {

constexpr uint32_t kNotNamed = UINT32_MAX;  // in place of a weight

// --- As an owner: words of weights ---------------------------------------------------------------------------------

// The bits of the weight of a pair, as they travel.
__device__ inline uint32_t weight_bits(const LlRun& ll, const LlCombineArgs& args, int pair) {
  if (ll_id(ll, args.ids, args.id_bytes, pair) < 0) return kNotNamed;
  if (args.weights == 0) return 0x3F800000u;  // 1
  const uint32_t bits = at<const uint32_t>(args.weights)[pair];
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits;  // another NaN
}

__device__ inline LlData weights_word(const LlRun& ll, const LlCombineArgs& args, int token, int word) {
  const int K = ll.op.header.topk;
  LlData data{};
#pragma unroll
  for (int u = 0; u < kLlWordUnits; ++u)
    if (const int k = kLlWordUnits * word + u; k < K) data.unit[u] = weight_bits(ll, args, token * K + k);
  return data;
}

// All workers of the kernel: send this rank's header to every peer, the next rank first, and the weights if it has many
// pairs.
__device__ inline void send_weights(const LlRun& ll, const LlCombineArgs& args) {
  const LlHeader& header = ll.op.header;
  const int R = ll.op.comm.num_ranks, me = ll.op.comm.rank;
  const int T = ll_has_few_pairs(ll.op, header.num_tokens) ? 0 : header.num_tokens;
  const int of_token = static_cast<int>(ll_weight_words(header.topk, header.weight_bytes));
  const int words = kLlHeaderWords + T * of_token;
  const Team team = team_of_workers();
#pragma unroll 1
  for (int i = static_cast<int>(team.index) * kWarp + lane_id(); i < words * R;
       i += static_cast<int>(team.size) * kWarp) {
    const int turn = i / words, word = i % words, peer = (me + 1 + turn) % R;
    if (ll.is_masked(peer)) continue;
    if (word < kLlHeaderWords) {
      ll_store(ll.block(peer).weights(ll.parity, me) + word, ll_header_word(ll, word), ll.tag());
    } else {
      const int token = (word - kLlHeaderWords) / of_token, of = (word - kLlHeaderWords) % of_token;
      const LlData data = weights_word(ll, args, token, of);
      ll_store(ll.block(peer).weights_of_token(ll.parity, me, token) + of, data, ll.tag());
    }
  }
#pragma unroll 1
  for (int peer = lane_id(); team.index == team.size - 1 && peer < R; peer += kWarp) {
    if (ll.is_masked(peer)) continue;
    const int stride = static_cast<int>(ll.lay.token_words);
    ll_refresh(ll, ll.block(peer).weights(ll.parity, me), ll.lay.weight_words, [=](int index) {
      const int place = index - kLlHeaderWords;
      return place < 0 || (place / stride < T && place % stride < of_token);
    });
    if (peer == me) refresh_pairs(ll, args);
  }
  __syncwarp();
}

// --- As a holder: partial rows -------------------------------------------------------------------------------------

struct LlTerm {
  int32_t row;
  float factor;
};

// An owner's token.
struct Owned {
  int owner;  // -1: there is no such token
  int token;
  int group;
  int tokens;  // T of the owner
};

// The tokens of a batch and their terms. In shared memory; `terms` has K entries for each token and is in dynamic
// shared memory.
struct LlLists {
  int32_t count[kLlMostInBatch];  // terms of the token that are named
  Owned of[kLlMostInBatch];
};

// The tokens of all owners with many pairs, as the CTAs of a kernel share them: in groups, owners in turn, the next
// rank first. This depends on the plan alone, so workers and the signalling warp see the same batches.
struct OwnedTokens {
  const LlRun& ll;
  const LlPlan plan;

  __device__ OwnedTokens(const LlRun& ll, const LlCombineArgs& args) : ll(ll), plan(ll_plan_of(ll.op, args.plan)) {}

  __device__ int tokens_of(int owner) const {
    const int tokens = min(max(plan.src_tokens[owner], 0), ll.op.header.max_tokens);
    return ll_has_few_pairs(ll.op, tokens) ? 0 : tokens;
  }
  __device__ Batches batches() const {
    int groups = 0, per_group = 1;  // 129 tokens make fewer groups than 128 tokens do
#pragma unroll 1
    for (int owner = 0; owner < ll.op.comm.num_ranks; ++owner) {
      groups = max(groups, ll_groups(tokens_of(owner)));
      per_group = max(per_group, ll_group_tokens(tokens_of(owner)));
    }
    return Batches(ll.op.comm.num_ranks * groups, per_group);
  }
  // The token at a place of a batch.
  __device__ Owned find(const Batches& batches, int batch, int place) const {
    const int R = ll.op.comm.num_ranks, in_group = place % batches.per_item;
    const int item = batches.item(batch, place / batches.per_item);
    const int owner = (ll.op.comm.rank + 1 + item % R) % R, group = item / R, T = tokens_of(owner);
    const int size = ll_group_tokens(T), token = group * size + in_group;
    const bool there = item < batches.items && in_group < size && token < T && !ll.is_masked(owner);
    return Owned{there ? owner : -1, token, group, T};
  }
  __device__ const int32_t* rows_of(int owner, int token) const {
    return plan.rows + (int64_t{owner} * ll.op.header.max_tokens + token) * ll.op.header.topk;
  }
  // One thread: returns whether the dispatch brought the token here.
  __device__ bool holds(int owner, int token) const {
    const int32_t* rows = rows_of(owner, token);
#pragma unroll 1
    for (int k = 0; k < ll.op.header.topk; ++k)
      if (rows[k] >= 0) return true;
    return false;
  }
};

// Workers of a CTA call the public functions.
template <class Element>
class LlHolder {
 public:
  __device__ LlHolder(const LlRun& ll, const LlCombineArgs& args, LlLists& lists, LlTerm* terms)
      : ll_(ll), args_(args), header_(ll.op.header), owned_(ll, args), lists_(lists), terms_(terms) {}

  // The last warp waits for the header of every owner, and compares T with the plan. Others return at once. False in a
  // warp that has met a fault.
  __device__ bool open() { return warp_id() != num_workers() - 1 || open_all(); }

  // Sends the partial rows of all batches. Also calls open(). False after a fault.
  __device__ bool run(int32_t* written) {
    const Batches batches = owned_.batches();
    const int pieces = (header_.row_bytes / 16 + kWarp - 1) / kWarp;
    bool ok = open();  // while the other warps list tokens
#pragma unroll 1
    for (int batch = 0; batch < batches.count(); ++batch) {
#pragma unroll 1
      for (int place = warp_id(); place < batches.places(); place += num_workers())
        ok = list(owned_.find(batches, batch, place), place) && ok;
      if (!join_workers(ok)) return false;
#pragma unroll 1
      for (int task = warp_id(); task < batches.places() * pieces; task += num_workers()) {
        const int place = task / pieces, count = lists_.count[place];
        if (count == 0) continue;
        reduce(lists_.of[place], (task - place * pieces) * kWarp + lane_id(), terms_ + place * header_.topk, count);
      }
      count_written(written);
      join_workers();  // the lists may be overwritten
    }
    return ok;
  }

 private:
  __device__ bool open_all() {
    const Comm& comm = ll_.op.comm;
    bool ok = true;
#pragma unroll 1
    for (int owner = lane_id(); owner < comm.num_ranks; owner += kWarp) {
      const int32_t tokens = owned_.plan.src_tokens[owner];
      LlHeader header;
      if (tokens < 0 || tokens > header_.max_tokens)
        ok = ll_fail(ll_, kBadHandle, comm.rank, owner, header_.max_tokens, tokens);
      const Found found = ll_open(ll_, owner, ll_.own().weights(ll_.parity, owner), &header);
      if (found == Found::kThere && header.num_tokens != tokens)
        ok = ll_fail(ll_, kDisagree, owner, kLlComparedFields, tokens, header.num_tokens);
      ok = ok && found != Found::kGaveUp;
    }
    return __all_sync(kAllLanes, ok) != 0;
  }

  // One warp: lists the terms of a token, in the order of k. Waits for its weights. False after a fault.
  __device__ bool list(const Owned& of, int place) {
    if (lane_id() == 0) lists_.count[place] = 0, lists_.of[place] = of;
    __syncwarp();
    if (of.owner < 0) return true;
    const Comm& comm = ll_.op.comm;
    const int32_t* rows = owned_.rows_of(of.owner, of.token);
    const LlWord* words = ll_.own().weights_of_token(ll_.parity, of.owner, of.token);
    const int64_t all_rows = local_experts(comm) * owned_.plan.expert_rows;
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < header_.topk; base += kWarp) {
      const int k = base + lane_id();
      const int32_t row = k < header_.topk ? rows[k] : -1;
      uint32_t bits = kNotNamed;
      bool ok = true;
      if (row >= 0) {
        LlData data;
        const Found found = ll_wait_words<1>(ll_, of.owner, words + k / kLlWordUnits, &data);
        const int u = k % kLlWordUnits;
        if (found == Found::kThere) bits = u == 0 ? data.unit[0] : u == 1 ? data.unit[1] : data.unit[2];
        ok = found != Found::kGaveUp;
        if (row >= all_rows) ok = ll_fail(ll_, kBadHandle, comm.rank, of.token, all_rows, row);
      }
      if (!__all_sync(kAllLanes, ok)) return false;
      const unsigned named = __ballot_sync(kAllLanes, bits != kNotNamed);
      if (bits != kNotNamed)
        terms_[place * header_.topk + count + __popc(named & ((1u << lane_id()) - 1u))] =
            LlTerm{row, __int_as_float(static_cast<int>(bits))};
      count += __popc(named);
    }
    if (lane_id() == 0) lists_.count[place] = count;
    __syncwarp();
    return true;
  }

  // All lanes: sums this lane's vector of the token's rows, and stores it into the owner's slot.
  __device__ __forceinline__ void reduce(const Owned& to, int unit, const LlTerm* terms, int count) const {
    const int me = ll_.op.comm.rank;
    const bool in = unit < header_.row_bytes / 16;
    const auto row = [&](int i) { return at<const char>(args_.y, int64_t{terms[i].row} * header_.row_bytes); };
    const auto factor = [&](int i) { return terms[i].factor; };
    LaneSum<Element> sum;
    if (in) sum.add(count, [&](int i) { return ptx::ld_coherent(vector_in(row(i), unit)); }, factor);
    char* slot = ll_.block(to.owner).slot(ll_.kind, ll_.parity, me, to.token);
    if constexpr (std::is_same_v<Element, BFloat16>) {
      if (header_.format == kLlLogfmt) return store_coded(slot, args_.hidden, unit, in, sum);
    }
    if (in) reinterpret_cast<int4*>(slot)[unit] = sum.rounded();
  }

  const LlRun& ll_;
  const LlCombineArgs& args_;
  const LlHeader& header_;
  const OwnedTokens owned_;
  LlLists& lists_;
  LlTerm* const terms_;
};

// The signalling warp: stores the flags of the groups of which this rank holds a token.
__device__ inline void signal_partials(const LlRun& ll, const LlCombineArgs& args, int32_t* written) {
  const OwnedTokens owned(ll, args);
  const Batches batches = owned.batches();
#pragma unroll 1
  for (int batch = 0; batch < batches.count(); ++batch) {
    // Lane p looks at place p; the lanes of a group vote.
    const int place = lane_id();
    Owned of{-1, 0, 0, 0};
    if (place < batches.places()) of = owned.find(batches, batch, place);
    const bool flagged = of.owner >= 0;
    const unsigned held = __ballot_sync(kAllLanes, flagged && owned.holds(of.owner, of.token));
    if (!fence_batch(ll, written, batch)) return;
    const int first = place / batches.per_item * batches.per_item;
    const unsigned of_group = held >> first & static_cast<unsigned>((uint64_t{1} << batches.per_item) - 1);
    if (place < batches.places() && place == first && flagged && of_group != 0)
      peer::store(ll.block(of.owner).flag(ll.kind, ll.parity, ll.op.comm.rank, of.group), ll.run.epoch);
    __syncwarp();
  }
}

}  // namespace ep::cuda
