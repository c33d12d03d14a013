// Layout: counts the tokens of each rank, node and expert, and writes which tokens go to which rank.
//
// Roles. The counts are numbered: ranks, then nodes, then experts. The number of CTAs is a power of two, and a CTA owns
// the counts whose number is its index modulo that. It also writes in_rank for the ranks that it owns. Every CTA reads
// all ids and needs no other CTA, so nothing has to be zeroed before the kernel. The threads of a CTA share the pairs
// of a tile of tokens. In shared memory each token has a word, with one bit for each count that the CTA owns. The pair
// that sets a bit counts the token. The token's other pairs find the bit set.
// Cost. Each CTA reads T * K ids, so the time grows with T * K as on one SM. It hardly depends on E: up to 1024 counts
// there are 32 CTAs at most, and beyond one for each 32 counts.
// Memory order. Each word of the outputs has one writer. The kernel touches this rank's memory only, and waits for
// nothing.
#include "cuda/core/launch.cuh"
#include "cuda/core/sync.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kThreads = 1024;     // threads of a CTA
constexpr int kCtas = 32;          // CTAs of a kernel with up to kCtas * kOwned counts
constexpr int kOwned = 32;         // the most counts of a CTA: one for each bit of a token's word
constexpr int kTileTokens = 4096;  // tokens whose words are in shared memory
constexpr int kIdsAtOnce = 4;      // ids that a thread loads before it uses them
// The pairs of a tile, and those of the turn after them, are numbered in 32 bits.
constexpr int kMaxPairsOfToken = INT32_MAX / kTileTokens - kThreads * kIdsAtOnce;

// The counts of this CTA in shared memory.
struct Owned {
  uint32_t* tokens;  // [kTileTokens] bit j: the token is in count number j * gridDim.x + blockIdx.x
  int32_t* counts;   // [kOwned]

  // Counts a token of the tile in the count with this number, once, if this CTA owns it.
  __device__ void count(int token, unsigned number) const {
    if ((number & (gridDim.x - 1)) != blockIdx.x) return;
    const unsigned index = number / gridDim.x;
    const uint32_t bit = 1u << index;
    if ((atomicOr(&tokens[token], bit) & bit) == 0) atomicAdd(&counts[index], 1);
  }
};

__device__ void count_pair(const LayoutArgs& args, const Owned& owned, int token, int expert) {
  const int places = args.num_ranks + args.num_nodes;
  owned.count(token, places + expert);
  if (static_cast<int>(blockIdx.x) >= places) return;  // this CTA owns experts alone
  const int rank = expert / (args.num_experts / args.num_ranks);
  owned.count(token, rank);
  if (args.num_nodes > 0) owned.count(token, args.num_ranks + at<const int32_t>(args.rank_node)[rank]);
}

// Counts the pairs of `tokens` tokens from token `begin` on. Id: the type of the ids. All ids of a thread's turn are
// loaded before the first one is used, since each load takes much longer than its use.
template <class Id>
__device__ void count_tile(const LayoutArgs& args, const Owned& owned, int begin, int tokens) {
  const int pairs = tokens * args.topk;
  const Id* ids = at<const Id>(args.ids) + static_cast<int64_t>(begin) * args.topk;
  for (int first = threadIdx.x; first < pairs; first += kThreads * kIdsAtOnce) {
    Id loaded[kIdsAtOnce];
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) loaded[i] = first + i * kThreads < pairs ? ids[first + i * kThreads] : -1;
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i)
      if (loaded[i] >= 0 && loaded[i] < args.num_experts)
        count_pair(args, owned, (first + i * kThreads) / args.topk, static_cast<int>(loaded[i]));
  }
}

// Writes in_rank for the tokens of the tile and the ranks of this CTA.
__device__ void write_in_rank(const LayoutArgs& args, const Owned& owned, int begin, int tokens) {
  for (int rank = blockIdx.x, bit = 0; rank < args.num_ranks; rank += gridDim.x, ++bit)
    for (int token = threadIdx.x; token < tokens; token += kThreads)
      at<bool>(args.in_rank)[static_cast<int64_t>(begin + token) * args.num_ranks + rank] =
          (owned.tokens[token] >> bit & 1u) != 0;
}

__global__ void __launch_bounds__(kThreads, 1) ep_layout(const __grid_constant__ LayoutArgs args) {
  __shared__ uint32_t tokens_of_tile[kTileTokens];
  __shared__ int32_t counts_of_cta[kOwned];
  const Owned owned{tokens_of_tile, counts_of_cta};
  if (threadIdx.x < kOwned) owned.counts[threadIdx.x] = 0;
  for (int begin = 0; begin < args.num_tokens; begin += kTileTokens) {
    const int tokens = min(kTileTokens, args.num_tokens - begin);
    for (int token = threadIdx.x; token < tokens; token += kThreads) owned.tokens[token] = 0;
    __syncthreads();
    if (args.id_bytes == 8)
      count_tile<int64_t>(args, owned, begin, tokens);
    else
      count_tile<int32_t>(args, owned, begin, tokens);
    __syncthreads();
    if (args.in_rank != 0)
      write_in_rank(args, owned, begin, tokens);  // each thread reads the words that it zeroes next
  }
  const int64_t number = static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x;
  if (threadIdx.x < kOwned && number < int64_t{args.num_ranks} + args.num_nodes + args.num_experts)
    at<int32_t>(args.counts)[number] = owned.counts[threadIdx.x];
}

}  // namespace

void layout(const LayoutArgs& args) {
  require(args.num_tokens >= 0, "num_tokens", "0 or more", args.num_tokens);
  require(args.topk >= 0 && args.topk <= kMaxPairsOfToken, "topk", "0 to 520191 on CUDA", args.topk);
  require(args.num_ranks >= 1, "num_ranks", "1 or more", args.num_ranks);
  require(args.num_experts >= args.num_ranks && args.num_experts % args.num_ranks == 0, "num_experts",
          "a multiple of num_ranks", args.num_experts);
  require(args.num_nodes >= 0 && args.num_nodes <= args.num_ranks, "num_nodes", "0 to num_ranks", args.num_nodes);
  require(args.id_bytes == 4 || args.id_bytes == 8, "id_bytes", "4 or 8", args.id_bytes);
  const int64_t counts = int64_t{args.num_ranks} + args.num_nodes + args.num_experts;
  int64_t ctas = 1;
  while ((ctas < kCtas && ctas < counts) || ctas * kOwned < counts) ctas *= 2;
  launch<ep_layout>("layout", ctas, kThreads, 0, args.stream, args);
}

}  // namespace ep::cuda
