// Layout: counts the tokens of each rank, node and expert, writes which tokens go to which rank, and numbers those that
// go to each other node.
//
// Roles. Each chunk of tokens has a group of CTAs. The counts are numbered: ranks, then nodes, then experts. The number
// of CTAs of a group is a power of two, and a CTA owns the counts whose number is its index modulo that. It also writes
// in_rank for the ranks and rail_rows for the nodes that it owns. The first CTA of a group copies the ids. Every CTA
// reads all ids of its chunk and needs no other CTA. The threads of a CTA share the pairs of a tile of tokens. In
// shared memory each token has a word, with one bit for each count that the CTA owns. The pair that sets a bit counts
// the token. The token's other pairs find the bit set. If rows may be left out, a second kernel counts again those
// chunks that have more tokens for a node than there is room for: a CTA for each chunk and node. Cost. Each CTA reads T
// * K ids, so the time grows with T * K as on one SM. It hardly depends on E: up to 1024 counts there are 32 CTAs at
// most, and beyond one for each 32 counts. The second kernel compares the ids of a token, K^2 / 2 at most. Memory
// order. A kernel's CTAs write different words. The second kernel follows the first one in the stream, and adds with
// atomics in a CTA. The kernels touch this rank's memory only, and wait for nothing.
#include "common/nodes.h"
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
  uint32_t* tokens;  // [kTileTokens] bit j: the token is in count number j * ctas + index
  int32_t* counts;   // [kOwned]
  unsigned ctas;     // of the chunk
  unsigned index;    // of this CTA among them

  // Counts a token of the tile in the count with this number, once, if this CTA owns it.
  __device__ void count(int token, unsigned number) const {
    if ((number & (ctas - 1)) != this->index) return;
    const unsigned index = number / ctas;
    const uint32_t bit = 1u << index;
    if ((atomicOr(&tokens[token], bit) & bit) == 0) atomicAdd(&counts[index], 1);
  }
};

__device__ void count_pair(const LayoutArgs& args, const Owned& owned, int token, int expert) {
  const int R = args.nodes.num_ranks, places = R + args.num_nodes;
  owned.count(token, places + expert);
  if (static_cast<int>(owned.index) >= places) return;  // this CTA owns experts alone
  const int rank = expert / (args.nodes.num_experts / R);
  owned.count(token, rank);
  if (args.num_nodes > 0) owned.count(token, R + node_of_rank(args, rank));
}

// Counts the pairs of `tokens` tokens from token `begin` on. Id: the type of the ids. All ids of a thread's turn are
// loaded before the first one is used, since each load takes much longer than its use.
template <class Id>
__device__ void count_tile(const LayoutArgs& args, const Owned& owned, int begin, int tokens) {
  const int pairs = tokens * args.topk;
  const int64_t first_pair = static_cast<int64_t>(begin) * args.topk;
  const Id* ids = at<const Id>(args.ids) + first_pair;
  int32_t* copy = args.messages == 0 || owned.index != 0 ? nullptr : at<int32_t>(args.own_ids) + first_pair;
  for (int first = threadIdx.x; first < pairs; first += kThreads * kIdsAtOnce) {
    Id loaded[kIdsAtOnce];
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) loaded[i] = first + i * kThreads < pairs ? ids[first + i * kThreads] : -1;
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      const int pair = first + i * kThreads;
      const int expert = loaded[i] >= 0 && loaded[i] < args.nodes.num_experts ? static_cast<int>(loaded[i]) : -1;
      if (copy != nullptr && pair < pairs) copy[pair] = expert;
      if (expert >= 0) count_pair(args, owned, pair / args.topk, expert);
    }
  }
}

// Writes in_rank for the tokens of the tile and the ranks of this CTA.
__device__ void write_in_rank(const LayoutArgs& args, const Owned& owned, int begin, int tokens) {
  const int R = args.nodes.num_ranks;
  for (int rank = owned.index, bit = 0; rank < R; rank += owned.ctas, ++bit)
    for (int token = threadIdx.x; token < tokens; token += kThreads)
      at<bool>(args.in_rank)[static_cast<int64_t>(begin + token) * R + rank] = (owned.tokens[token] >> bit & 1u) != 0;
}

// All threads: the sum of the values of the threads before this one. `total`: of all of them.
__device__ int sum_before(int value, int* total) {
  __shared__ int of_warps[kThreads / kWarp];
  const int through = sum_through(value);
  if (lane_id() == kWarp - 1) of_warps[warp_id()] = through;
  __syncthreads();
  int before = 0;
  *total = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    before += warp < warp_id() ? of_warps[warp] : 0;
    *total += of_warps[warp];
  }
  __syncthreads();
  return before + through - value;
}

// Numbers the tokens of the tile that go to each node of this CTA. All of the tile's tokens are in the counts.
__device__ void number_rows(const LayoutArgs& args, const Owned& owned, int begin, int tokens) {
  constexpr int kOfThread = kTileTokens / kThreads;  // consecutive tokens
  const int R = args.nodes.num_ranks, N = args.num_nodes, first = threadIdx.x * kOfThread;
  for (int bit = 0; bit < kOwned; ++bit) {
    const int node = bit * static_cast<int>(owned.ctas) + static_cast<int>(owned.index) - R;
    if (node < 0 || node >= N) continue;  // the same for all threads
    const bool leaves = node != args.nodes.node;
    int goes = 0, total;
    for (int i = 0; i < kOfThread; ++i) goes += first + i < tokens && (owned.tokens[first + i] >> bit & 1u) != 0;
    int number = sum_before(goes, &total);
    number += owned.counts[bit] - total;
    int32_t* rows = at<int32_t>(args.rail_rows) + static_cast<int64_t>(begin) * N + node;
    for (int token = first; token < first + kOfThread && token < tokens; ++token) {
      const bool is_counted = (owned.tokens[token] >> bit & 1u) != 0 && leaves;
      rows[static_cast<int64_t>(token) * N] = is_counted && (args.padded == 0 || number < args.padded) ? number : -1;
      number += is_counted;
    }
  }
}

__device__ void write_rail_overflow(const CountPlaces& places, int64_t* message, int64_t left_out, int64_t most_rows) {
  places.rail_overflow(message)[kLeftOut] = left_out;
  places.rail_overflow(message)[kMostRows] = most_rows;
}

__device__ void count_one(int64_t* count) { atomicAdd(reinterpret_cast<unsigned long long*>(count), 1ull); }

__global__ void __launch_bounds__(kThreads, 1) ep_layout(const __grid_constant__ LayoutArgs args) {
  __shared__ uint32_t tokens_of_tile[kTileTokens];
  __shared__ int32_t counts_of_cta[kOwned];
  const int chunks = num_chunks_of(args);
  const unsigned ctas = gridDim.x / chunks, index = blockIdx.x % ctas;
  const int chunk = static_cast<int>(blockIdx.x / ctas);
  const int end = chunk_begin(args.num_tokens, chunk + 1, chunks);
  const Owned owned{tokens_of_tile, counts_of_cta, ctas, index};
  if (threadIdx.x < kOwned) owned.counts[threadIdx.x] = 0;
  for (int begin = chunk_begin(args.num_tokens, chunk, chunks); begin < end; begin += kTileTokens) {
    const int tokens = min(kTileTokens, end - begin);
    for (int token = threadIdx.x; token < tokens; token += kThreads) owned.tokens[token] = 0;
    __syncthreads();
    if (args.id_bytes == 8)
      count_tile<int64_t>(args, owned, begin, tokens);
    else
      count_tile<int32_t>(args, owned, begin, tokens);
    __syncthreads();
    if (args.in_rank != 0) write_in_rank(args, owned, begin, tokens);
    if (args.messages != 0) number_rows(args, owned, begin, tokens);
    __syncthreads();
  }
  const CountPlaces places(args);
  const int64_t number = static_cast<int64_t>(threadIdx.x) * ctas + index;
  if (threadIdx.x < kOwned && number < int64_t{args.nodes.num_ranks} + args.num_nodes + args.nodes.num_experts)
    places.write(chunk, static_cast<int>(number), owned.counts[threadIdx.x]);
  if (args.messages == 0 || blockIdx.x != 0) return;
  const int64_t* header = reinterpret_cast<const int64_t*>(&args.header);
  for (int i = threadIdx.x; i < args.num_nodes * kHeaderFields; i += kThreads)
    places.message(i / kHeaderFields)[i % kHeaderFields] = header[i % kHeaderFields];
  for (int i = threadIdx.x; i <= args.num_nodes; i += kThreads)
    places.waited(i < args.num_nodes ? places.message(i) : places.received_from_here()) = waited_before(args.nodes);
  if (threadIdx.x == 0 && args.nodes.waits != 0) at<uint64_t>(args.nodes.waits)[kMessagesWritten] = ptx::globaltimer();
  if (args.padded > 0) return;  // ep_leave_out writes it
  for (int i = threadIdx.x; i <= args.num_nodes; i += kThreads)
    write_rail_overflow(places, i < args.num_nodes ? places.message(i) : places.received_from_here(), 0, 0);
}

// Corrects the counts of chunks with more tokens for a node than `padded`: the last ones are left out. CTA (chunk,
// node) counts that chunk's other tokens again, by the rows that ep_layout has given them. The CTAs of chunk 0 also
// write what was left out for all nodes, this node's for itself.
__global__ void __launch_bounds__(kThreads, 1) ep_leave_out(const __grid_constant__ LayoutArgs args) {
  const CountPlaces places(args);
  const int N = args.num_nodes, C = num_chunks_of(args), node = blockIdx.x % N, chunk = blockIdx.x / N;
  const int ranks = args.nodes.num_ranks / N, per_rank = args.nodes.num_experts / args.nodes.num_ranks;
  if (chunk == 0 && warp_id() == 0) {
    int64_t rail_overflow[kRailOverflowWords] = {};
    for (int i = lane_id(); i < N * C; i += kWarp)
      if (i % N != args.nodes.node) add_left_out(args, places.tokens(i / N, i % N), rail_overflow);
    const int64_t left_out = sum_of_warp(rail_overflow[kLeftOut]), most = max_of_warp(rail_overflow[kMostRows]);
    if (lane_id() == 0) {
      write_rail_overflow(places, places.message(node), left_out, most);
      if (node == args.nodes.node) write_rail_overflow(places, places.received_from_here(), left_out, most);
    }
  }
  if (node == args.nodes.node || places.tokens(chunk, node) <= args.padded) return;
  int64_t* parts = places.parts(chunk, node);
  for (int i = threadIdx.x; i < ranks * (1 + per_rank); i += kThreads) parts[i] = 0;
  __syncthreads();
  const int end = chunk_begin(args.num_tokens, chunk + 1, C), K = args.topk;
  for (int token = chunk_begin(args.num_tokens, chunk, C) + threadIdx.x; token < end; token += kThreads) {
    if (at<const int32_t>(args.rail_rows)[static_cast<int64_t>(token) * N + node] < 0) continue;
    const int32_t* ids = at<const int32_t>(args.own_ids) + static_cast<int64_t>(token) * K;
    const auto place_of = [&](int k) {  // of an expert's rank; -1: none
      return ids[k] < 0 ? -1 : at<const int32_t>(args.nodes.rank_place)[ids[k] / per_rank];
    };
    for (int k = 0; k < K; ++k) {
      const int place = place_of(k);
      if (place < 0 || place / ranks != node) continue;
      bool is_new_rank = true, is_new_expert = true;
      for (int before = 0; before < k; ++before) {
        is_new_rank = is_new_rank && place_of(before) != place;
        is_new_expert = is_new_expert && ids[before] != ids[k];
      }
      const int rank = place % ranks;
      if (is_new_rank) count_one(&parts[rank]);
      if (is_new_expert) count_one(&parts[ranks + rank * per_rank + ids[k] % per_rank]);
    }
  }
}

}  // namespace

void layout(const LayoutArgs& args) {
  const int R = args.nodes.num_ranks, E = args.nodes.num_experts, N = args.num_nodes;
  require(args.num_tokens >= 0, "num_tokens", "0 or more", args.num_tokens);
  require(args.topk >= 0 && args.topk <= kMaxPairsOfToken, "topk", "0 to 520191 on CUDA", args.topk);
  require(R >= 1, "num_ranks", "1 or more", R);
  require(E >= R && E % R == 0, "num_experts", "a multiple of num_ranks", E);
  require(N >= 0 && N <= R, "num_nodes", "0 to num_ranks", N);
  require(args.id_bytes == 4 || args.id_bytes == 8, "id_bytes", "4 or 8", args.id_bytes);
  if (args.messages != 0) {
    require(N >= 1 && R % N == 0, "num_nodes", "a divisor of num_ranks", N);
    require(args.nodes.num_chunks >= 1, "num_chunks", "1 or more", args.nodes.num_chunks);
    require(args.num_tokens == 0 || args.rail_rows != 0, "rail_rows", "an address", 0);
    require(args.num_tokens == 0 || args.topk == 0 || args.own_ids != 0, "own_ids", "an address", 0);
  }
  const int64_t counts = int64_t{R} + N + E;
  int64_t ctas = 1;
  while ((ctas < kCtas && ctas < counts) || ctas * kOwned < counts) ctas *= 2;
  launch<ep_layout>("layout", ctas * num_chunks_of(args), kThreads, 0, args.stream, args);
  if (args.messages != 0 && args.padded > 0)
    launch<ep_leave_out>("layout", int64_t{N} * num_chunks_of(args), kThreads, 0, args.stream, args);
}

}  // namespace ep::cuda
