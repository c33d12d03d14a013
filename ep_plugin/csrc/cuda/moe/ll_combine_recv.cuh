// The receive half of low-latency combine. ll_combine.cu describes roles and memory order.
#pragma once
#include "cuda/moe/ll_sum.cuh"

namespace ep::cuda {

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
      LaneSum<Element> sum;
#pragma unroll 1
      for (int base = 0; base < ll_.op.comm.num_ranks; base += kWarp) {
        uint32_t holders = ll_ranks_of(ll_, args_.ids, args_.id_bytes, token, base);
        if (!wait_holders(token, base, &holders)) return false;
        if (unit < units) add_rows(token, unit, base, holders, sum);
      }
      if (unit < units) finish(token, unit, sum);
    }
  }

 private:
  __device__ const char* bias(int token) const {
    return args_.bias == 0 ? nullptr : at<const char>(args_.bias, int64_t{token} * header_.row_bytes);
  }
  __device__ char* out(int token) const { return at<char>(args_.out, int64_t{token} * header_.row_bytes); }

  // All lanes: waits for the flags of the holders, one lane each, and drops masked holders. False after a fault.
  // holders: bit r: rank base + r holds the token.
  __device__ __forceinline__ bool wait_holders(int token, int base, uint32_t* holders) const {
    const int group = token / ll_group_tokens(header_.num_tokens), rank = base + lane_id();
    Found found = Found::kThere;
    if ((*holders >> lane_id() & 1u) != 0)
      found = ll_wait_at_least(ll_, rank, ll_.own().flag(ll_.kind, ll_.parity, rank, group), ll_.run.epoch);
    *holders &= __ballot_sync(kAllLanes, found == Found::kThere);
    __syncwarp();  // then all lanes may read the data that one lane has acquired
    return __all_sync(kAllLanes, found != Found::kGaveUp) != 0;
  }

  // Adds the partial rows of these holders, in their order.
  __device__ __forceinline__ void add_rows(int token, int unit, int base, uint32_t holders,
                                           LaneSum<Element>& sum) const {
    const auto next_slot = [&] {
      const int rank = base + __ffs(static_cast<int>(holders)) - 1;
      holders &= holders - 1;
      return ll_.own().slot(ll_.kind, ll_.parity, rank, token);
    };
    if constexpr (std::is_same_v<Element, BFloat16>) {
      if (header_.format == kLlLogfmt) {
#pragma unroll 1
        while (holders != 0) add_coded(next_slot(), args_.hidden, unit, sum);
        return;
      }
    }
    sum.add(
        __popc(holders), [&](int) { return ptx::ld_coherent(vector_in(next_slot(), unit)); }, [](int) { return 1.0f; });
  }
  __device__ __forceinline__ void finish(int token, int unit, LaneSum<Element>& sum) const {
    const char* added = bias(token);
    if (added != nullptr) Element::add(sum.of, ptx::ld_coherent(vector_in(added, unit)), 1.0f);
    reinterpret_cast<int4*>(out(token))[unit] = sum.rounded();
  }

  const LlRun& ll_;
  const LlCombineArgs& args_;
  const LlHeader& header_;
};

}  // namespace ep::cuda
