// Plan and notify divide tokens and their (token, expert) pairs in this way: one block of tokens per CTA and, in plan,
// one lane per pair.
#pragma once
#include "cuda/core/sync.cuh"

namespace ep::cuda {

extern __shared__ int32_t counts[];  // [R] tokens for each rank, [E] pairs for each expert, up to 3 unused words

EP_HD int num_keys(const Comm& comm) { return comm.num_ranks + comm.num_experts; }

// Tokens [begin, end) of a block.
struct Block {
  int begin, end;
  __device__ Block(int num_tokens, int block)
      : begin(min(block * block_tokens(num_tokens), num_tokens)),
        end(min(begin + block_tokens(num_tokens), num_tokens)) {}
};

// The tokens that a warp handles at a time. A token has K lanes, rounded up to a power of two; with K above 32, it has
// all 32 lanes several times.
struct WarpTokens {
  int topk;
  int token_lanes = 1;
  uint64_t ranks_per_2_32;  // 2^32 / E_l, rounded up. The division by it is exact up to kMaxKeys experts

  __device__ WarpTokens(const Comm& comm, int topk)
      : topk(topk), ranks_per_2_32(1ull + UINT32_MAX / static_cast<unsigned>(local_experts(comm))) {
    while (token_lanes < min(topk, kWarp)) token_lanes *= 2;
  }

  __device__ int tokens() const { return kWarp / token_lanes; }
  // This lane's token among the tokens of the warp, and the first of the token's pairs that this lane handles.
  __device__ int token() const { return lane_id() / token_lanes; }
  __device__ int k() const { return lane_id() % token_lanes; }

  // The bit of the expert's rank in the word of ranks [base, base + 32); no bit for other ranks and for -1.
  __device__ unsigned rank_bit(int expert, int base) const {
    const unsigned rank = static_cast<unsigned>(static_cast<unsigned>(expert) * ranks_per_2_32 >> 32) - base;
    return expert < 0 || rank >= kWarp ? 0u : 1u << rank;
  }
  // All lanes: the bits of all lanes of this lane's token, combined.
  __device__ unsigned bits_of_token(unsigned bits) const {
    for (int step = 1; step < token_lanes; step *= 2) bits |= __shfl_xor_sync(kAllLanes, bits, step);
    return bits;
  }
};

}  // namespace ep::cuda
