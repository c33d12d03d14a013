// How plan and notify walk over tokens and their (token, expert) pairs: one block of tokens for each CTA, and in plan,
// one lane for each pair.
#pragma once
#include "cuda/core/sync.cuh"

namespace ep::cuda {

extern __shared__ int32_t counts[];  // [R] tokens for each rank, then [E] pairs for each expert, then up to 3 unused

EP_HD int num_keys(const Comm& comm) { return comm.num_ranks + comm.num_experts; }

// Tokens [begin, end) of a block.
struct Block {
  int begin, end;
  __device__ Block(int num_tokens, int block)
      : begin(min(block * block_tokens(num_tokens), num_tokens)),
        end(min(begin + block_tokens(num_tokens), num_tokens)) {}
};

// A warp's step: whole tokens, each with its K rounded up to a power of two lanes, or all 32 of them several times.
struct Step32 {
  int topk;
  int token_lanes = 1;
  uint64_t ranks_per_2_32;  // 2^32 / E_l, rounded up: exact for as few experts as there may be

  __device__ Step32(const Comm& comm, int topk)
      : topk(topk), ranks_per_2_32(1ull + UINT32_MAX / static_cast<unsigned>(local_experts(comm))) {
    while (token_lanes < min(topk, kWarp)) token_lanes *= 2;
  }

  __device__ int tokens() const { return kWarp / token_lanes; }
  // This lane's token within the step, and the first of its pairs.
  __device__ int token() const { return lane_id() / token_lanes; }
  __device__ int k() const { return lane_id() % token_lanes; }

  // A bit for the expert's rank, none for -1.
  __device__ unsigned rank_bit(int expert) const {
    return expert < 0 ? 0u : 1u << (static_cast<unsigned>(expert) * ranks_per_2_32 >> 32);
  }
  // In each lane of a token, the bits of all its lanes.
  __device__ unsigned bits_of_token(unsigned bits) const {
    for (int step = 1; step < token_lanes; step *= 2) bits |= __shfl_xor_sync(kAllLanes, bits, step);
    return bits;
  }
};

}  // namespace ep::cuda
