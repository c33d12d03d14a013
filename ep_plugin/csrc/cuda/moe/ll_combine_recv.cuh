// The receive half of low-latency combine. ll_combine.cu describes roles and memory order.
#pragma once
#include "cuda/moe/ll_sum.cuh"

namespace ep::cuda {

// The ranks that hold a token, in their order, four bits each.
struct Holders {
  uint64_t ranks = 0;
  int count = 0;
  __device__ explicit Holders(uint32_t bits) {
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1)
      ranks |= static_cast<uint64_t>(__ffs(static_cast<int>(bits)) - 1) << 4 * count++;
  }
  __device__ __forceinline__ int operator[](int i) const { return static_cast<int>(ranks >> 4 * i & 15u); }
};
static_assert(kMaxRanks <= 16, "a rank fits in four bits");

// The sums of this rank's tokens, if it has many pairs.
template <class Element>
class LlOwner {
 public:
  __device__ LlOwner(const LlRun& ll, const LlCombineArgs& args) : ll_(ll), args_(args), header_(ll.op.header) {}

  // Workers. False after a fault.
  __device__ bool run() const {
    const int T = header_.num_tokens, grid = static_cast<int>(gridDim.x), units = header_.row_bytes / 16;
    const int pieces = (units + kWarp - 1) / kWarp;
#pragma unroll 1
    for (int task = warp_id();; task += num_workers()) {
      const int token = static_cast<int>(blockIdx.x) + task / pieces * grid;
      if (token >= T) return true;
      const int unit = task % pieces * kWarp + lane_id();
      if (!add_rows(token, unit, unit < units, ll_ranks_of(ll_, args_.ids, args_.id_bytes, token))) return false;
    }
  }

 private:
  __device__ const char* bias(int token) const {
    return args_.bias == 0 ? nullptr : at<const char>(args_.bias, int64_t{token} * header_.row_bytes);
  }
  __device__ char* out(int token) const { return at<char>(args_.out, int64_t{token} * header_.row_bytes); }

  // All lanes: waits for the flags of the holders, one lane each, and drops masked holders. False after a fault.
  __device__ __forceinline__ bool wait_holders(int token, uint32_t* ranks) const {
    const int group = token / ll_group_tokens(header_.num_tokens), rank = lane_id();
    Found found = Found::kThere;
    if ((*ranks >> rank & 1u) != 0)
      found = ll_wait_at_least(ll_, rank, ll_.own().flag(ll_.kind, ll_.parity, rank, group), ll_.run.epoch);
    *ranks &= __ballot_sync(kAllLanes, found == Found::kThere);
    __syncwarp();  // then all lanes may read the data that one lane has acquired
    return __all_sync(kAllLanes, found != Found::kGaveUp) != 0;
  }

  __device__ __forceinline__ bool add_rows(int token, int unit, bool in, uint32_t ranks) const {
    if (!wait_holders(token, &ranks)) return false;
    if (!in) return true;
    const Holders holders(ranks);
    const auto slot = [&](int i) { return ll_.own().slot(ll_.kind, ll_.parity, holders[i], token); };
    LaneSum<Element> sum;
    if constexpr (std::is_same_v<Element, BFloat16>) {
      if (header_.format == kLlLogfmt) {
#pragma unroll 1
        for (int i = 0; i < holders.count; ++i) add_coded(slot(i), args_.hidden, unit, sum);
        return finish(token, unit, sum);
      }
    }
    sum.add(holders.count, [&](int i) { return ptx::ld_coherent(vector_in(slot(i), unit)); }, [](int) { return 1.0f; });
    return finish(token, unit, sum);
  }
  __device__ __forceinline__ bool finish(int token, int unit, LaneSum<Element>& sum) const {
    const char* added = bias(token);
    if (added != nullptr) Element::add(sum.of, ptx::ld_coherent(vector_in(added, unit)), 1.0f);
    reinterpret_cast<int4*>(out(token))[unit] = sum.rounded();
    return true;
  }

  const LlRun& ll_;
  const LlCombineArgs& args_;
  const LlHeader& header_;
};

}  // namespace ep::cuda
