// Low-latency combine to owners with few pairs: holders send each pair's row as words, and the owner weights and adds
// them. Nothing goes from the owner to the holders first. ll_combine.cu describes roles and memory order.
#pragma once
#include "cuda/moe/ll_sum.cuh"

namespace ep::cuda {

constexpr int kRowsAtOnce = 8;  // rows whose loads are in flight together

// --- As a holder ---------------------------------------------------------------------------------------------------

// Workers: send the rows that this rank holds to the owners with few pairs. CTAs take tokens in turn; if there are more
// CTAs than tokens, several share a token. Warps take 32 words of a row at a time. False after a fault.
__device__ inline bool send_pairs(const LlRun& ll, const LlCombineArgs& args) {
  const Comm& comm = ll.op.comm;
  const LlHeader& header = ll.op.header;
  const LlPlan plan = ll_plan_of(ll.op, args.plan);
  const int K = header.topk, R = comm.num_ranks, grid = static_cast<int>(gridDim.x);
  const auto few_tokens = [&](int owner) {
    const int tokens = min(max(plan.src_tokens[owner], 0), header.max_tokens);
    return ll_has_few_pairs(ll.op, tokens) && !ll.is_masked(owner) ? tokens : 0;
  };
  int most = 0;
#pragma unroll 1
  for (int owner = 0; owner < R; ++owner) most = max(most, few_tokens(owner));
  if (most == 0) return true;
  const int items = most * R, shares = max(1, grid / items), share = static_cast<int>(blockIdx.x) / items;
  const int words = static_cast<int>(ll_words(header.row_bytes)), pieces = (words + kWarp - 1) / kWarp;
  const int64_t all_rows = local_experts(comm) * plan.expert_rows;
  bool ok = true;
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x) % items; ok && share < shares && item < items; item += grid) {
    const int owner = (comm.rank + 1 + item % R) % R, token = item / R;
    if (token >= few_tokens(owner)) continue;
    const int32_t* rows = plan.rows + (int64_t{owner} * header.max_tokens + token) * K;
    int task = share * num_workers() + warp_id(), begin = 0;  // tasks [begin, begin + pieces) belong to one row
#pragma unroll 1
    for (int base = 0; base < K; base += kWarp) {
      const int32_t held = base + lane_id() < K ? rows[base + lane_id()] : -1;
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, held >= 0); ok && left != 0; left &= left - 1, begin += pieces) {
        const int bit = __ffs(static_cast<int>(left)) - 1;
        const int32_t row = __shfl_sync(kAllLanes, held, bit);
        if (row >= all_rows) ok = ll_fail(ll, kBadHandle, comm.rank, token, all_rows, row);
        const char* from = at<const char>(args.y, int64_t{row} * header.row_bytes);
        LlWord* to = ll.block(owner).pair_words(ll.parity, token * K + base + bit);
#pragma unroll 1
        for (; ok && task < begin + pieces; task += shares * num_workers()) {
          const int word = (task - begin) * kWarp + lane_id();
          if (word < words) ll_store(to + word, data_of(load_word_unit(from, word, header.row_bytes / 4)), ll.tag());
        }
        __syncwarp();
      }
    }
  }
  return ok;
}

// --- As the owner --------------------------------------------------------------------------------------------------

// One thread of the kernel: refreshes a word of this rank's rows of pairs, which several holders write.
__device__ inline void refresh_pairs(const LlRun& ll, const LlCombineArgs& args) {
  const LlHeader& header = ll.op.header;
  const int few = ll_has_few_pairs(ll.op, header.num_tokens) ? header.num_tokens * header.topk : 0;
  const int per_row = static_cast<int>(ll.lay.words_per_row);
  ll_refresh(ll, ll.own().pair_words(ll.parity, 0), int64_t{kLlFewPairs} * per_row, [&](int index) {
    const int pair = index / per_row, id = pair < few ? ll_id(ll, args.ids, args.id_bytes, pair) : -1;
    return index % per_row < ll_words(header.row_bytes) && id >= 0 && !ll.is_masked(id / local_experts(ll.op.comm));
  });
}

// The sums of this rank's few tokens.
template <class Element>
class LlFewOwner {
 public:
  __device__ LlFewOwner(const LlRun& ll, const LlCombineArgs& args) : ll_(ll), args_(args), header_(ll.op.header) {}

  // Workers. The words of all tokens go round the warps of all CTAs. False after a fault.
  __device__ bool run() const {
    const int words = static_cast<int>(ll_words(header_.row_bytes)), pieces = (words + kWarp - 1) / kWarp;
    const Team team = team_of_workers();
    bool ok = true;
#pragma unroll 1
    for (int task = static_cast<int>(team.index); ok && task < header_.num_tokens * pieces;
         task += static_cast<int>(team.size)) {
      const int token = task / pieces, word = (task - token * pieces) * kWarp + lane_id();
      ok = add(token, word, word < words);
    }
    return ok;
  }

 private:
  // All lanes: sums one word of a token's rows that are named, in the order of k. A masked holder adds nothing.
  __device__ __forceinline__ bool add(int token, int word, bool in) const {
    const int K = header_.topk, per_rank = local_experts(ll_.op.comm), row_units = header_.row_bytes / 4;
    const int per_row = static_cast<int>(ll_.lay.words_per_row);
    LaneSum<Element> sum;
#pragma unroll 1
    for (int base = 0; base < K; base += kWarp) {
      const int k = base + lane_id(), first = token * K + base;
      const LlWord* words = from(first, word);
      const int id = k < K ? ll_id(ll_, args_.ids, args_.id_bytes, token * K + k) : -1;
      const float weight = id >= 0 && args_.weights != 0 ? at<const float>(args_.weights)[token * K + k] : 1.0f;
      unsigned left = __ballot_sync(kAllLanes, id >= 0 && !ll_.is_masked(id / per_rank));
#pragma unroll 1
      while (left != 0) {
        LlData data[kRowsAtOnce];
        int bits[kRowsAtOnce];
        unsigned others = left;
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i, others &= others - 1)
          bits[i] = __ffs(static_cast<int>(others)) - 1;  // -1: there are no more
        bool there = !in;
#pragma unroll 1
        for (int polls = ll_.polls(); !there && polls > 0; --polls) {
          uint64_t seen;
          there = true;
#pragma unroll
          for (int i = 0; i < kRowsAtOnce; ++i)  // their loads are in flight together
            if (bits[i] >= 0) there &= ll_load_words<1>(ll_, words + bits[i] * per_row, data + i, &seen);
        }
        if (__any_sync(kAllLanes, !there) != 0) {
          if (__any_sync(kAllLanes, !there && !wait_longer(first, left & ~others, word)) != 0) return false;
          continue;
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
          if (bits[i] < 0) break;
          const float factor = __shfl_sync(kAllLanes, weight, bits[i]);
          if (in) Element::add(sum.of, vector_of(data[i]), factor);
        }
        left = others;
      }
    }
    if (!in) return true;
    const int64_t offset = int64_t{token} * header_.row_bytes;
    if (args_.bias != 0)
      Element::add(sum.of, load_word_unit(at<const char>(args_.bias, offset), word, row_units), 1.0f);
    const LlData rounded = data_of(sum.rounded());
#pragma unroll
    for (int u = 0; u < kLlWordUnits; ++u)
      if (const int unit = kLlWordUnits * word + u; unit < row_units)
        at<uint32_t>(args_.out, offset)[unit] = rounded.unit[u];
    return true;
  }
  // One thread: waits for a word of the pairs first + b, for each bit b. False after a fault.
  __device__ __forceinline__ bool wait_longer(int first, unsigned bits, int word) const {
    const int per_rank = local_experts(ll_.op.comm);
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1) {
      const int pair = first + __ffs(static_cast<int>(bits)) - 1;
      const int holder = ll_id(ll_, args_.ids, args_.id_bytes, pair) / per_rank;
      if (ll_wait_longer(ll_, holder, Awaited{from(pair, word), ll_.tag(), 1}) != Found::kThere) return false;
    }
    return true;
  }
  __device__ __forceinline__ const LlWord* from(int pair, int word) const {
    return ll_.own().pair_words(ll_.parity, pair) + word;
  }

  const LlRun& ll_;
  const LlCombineArgs& args_;
  const LlHeader& header_;
};

}  // namespace ep::cuda
