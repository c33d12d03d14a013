// Words in the blocks of ranks, and what travels in them: headers, and ids as the caller gave them.
// common/low_latency.h has their layout.
#pragma once
#include <cstddef>

#include "cuda/moe/low_latency.cuh"

namespace ep::cuda {

constexpr int kLlWordUnits = 3;  // 4-byte units of data in a word
constexpr int kLlMaskField = offsetof(LlHeader, mask) / 4;

struct LlData {
  uint32_t unit[kLlWordUnits];
};

__device__ __forceinline__ void ll_store(LlWord* to, const LlData& data, uint32_t tag) {
  peer::store(to, static_cast<uint64_t>(data.unit[1]) << 32 | data.unit[0],
              static_cast<uint64_t>(tag) << 32 | data.unit[2]);
}
// Loads a word and returns its tag.
__device__ __forceinline__ uint32_t ll_load(const LlWord* from, LlData* data) {
  uint64_t low, high;
  peer::poll(from, &low, &high);
  data->unit[0] = static_cast<uint32_t>(low);
  data->unit[1] = static_cast<uint32_t>(low >> 32);
  data->unit[2] = static_cast<uint32_t>(high);
  return static_cast<uint32_t>(high >> 32);
}

// Loads kWords words that follow each other; their loads are in flight together. Whether all have this operation's tag.
template <int kWords>
__device__ __forceinline__ bool ll_load_words(const LlRun& ll, const LlWord* from, LlData* data, uint64_t* seen) {
  uint32_t tags[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) tags[i] = ll_load(from + i, data + i);
  bool there = true;
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    if (tags[i] != ll.tag()) there = false, *seen = tags[i];
  return there;
}
// One thread: waits for such words.
template <int kWords>
__device__ __forceinline__ Found ll_wait_words(const LlRun& ll, int peer, const LlWord* from, LlData* data) {
  if (ll.is_masked(peer)) return Found::kMasked;
  uint64_t seen = 0;
  if (ll_load_words<kWords>(ll, from, data, &seen)) return Found::kThere;
  const Found found = ll_wait_longer(ll, peer, Awaited{from, ll.tag(), kWords});
  ll_load_words<kWords>(ll, from, data, &seen);
  return found;
}

// How many words of ids a rank sends to a peer. Where T_max allows few, their number depends on T_max alone, so that a
// receiver may wait for them beside the header, which has T.
constexpr int64_t kLlFewIdWords = 64;
__device__ __forceinline__ bool ll_ids_are_few(const LlHeader& header) {
  return ll_id_words(header.max_tokens, header.topk) <= kLlFewIdWords;
}
__device__ __forceinline__ int ll_sent_id_words(const LlHeader& header, int num_tokens) {
  return static_cast<int>(ll_id_words(ll_ids_are_few(header) ? header.max_tokens : num_tokens, header.topk));
}

// Unit `unit` of a word's bytes in a row of `units` 4-byte units; zero beyond its end.
__device__ __forceinline__ uint32_t ll_unit(const char* row, int unit, int units) {
  return unit < units ? static_cast<uint32_t>(ptx::ld_coherent(reinterpret_cast<const int32_t*>(row) + unit)) : 0u;
}

// Word `word` of this rank's header.
__device__ inline LlData ll_header_word(const LlRun& ll, int word) {
  const int32_t* fields = reinterpret_cast<const int32_t*>(&ll.op.header);
  LlData data;
#pragma unroll
  for (int u = 0; u < kLlWordUnits; ++u) {
    const int field = kLlWordUnits * word + u;
    data.unit[u] = field == kLlMaskField ? ll.masked : static_cast<uint32_t>(fields[field]);
  }
  return data;
}

// One thread: refreshes one of `count` words, unless this operation writes it anyway (low_latency.h: ll_refreshed).
template <class IsWritten>
__device__ inline void ll_refresh(const LlRun& ll, LlWord* words, int64_t count, IsWritten is_written) {
  const int64_t index = ll_refreshed(ll.run.epoch, count);
  if (!is_written(static_cast<int>(index))) ll_store(words + index, LlData{}, ll.tag());
}
// One thread: does so for the words of rows for one peer. goes(token): this operation writes the token's words.
template <class Goes>
__device__ inline void ll_refresh_rows(const LlRun& ll, int peer, int num_tokens, int64_t bytes, Goes goes) {
  const int per_row = static_cast<int>(ll.lay.words_per_row);
  LlWord* words = ll.block(peer).row_words(ll.kind, ll.parity, ll.op.comm.rank, 0);
  ll_refresh(ll, words, int64_t{kLlWordTokens} * per_row, [&](int index) {
    const int token = index / per_row;
    return ll_rows_are_words(num_tokens) && token < num_tokens && index % per_row < ll_words(bytes) && goes(token);
  });
}

// One thread: waits for a peer's header, compares it with this rank's, and adopts its masks.
static __device__ EP_NOINLINE Found ll_open(const LlRun ll, int peer, const LlWord* words, LlHeader* header) {
  const Comm& comm = ll.op.comm;
  const LlHeader& mine = ll.op.header;
  LlData data[kLlHeaderWords];
  const Found found = ll_wait_words<kLlHeaderWords>(ll, peer, words, data);
  if (found != Found::kThere) return found;
  memcpy(header, data, sizeof(LlHeader));
  bool ok = true;
  const int field = ll_header_mismatch(mine, *header);
  if (field >= 0)
    ok = ll_fail(ll, kDisagree, peer, field, reinterpret_cast<const int32_t*>(&mine)[field],
                 reinterpret_cast<const int32_t*>(header)[field]);
  else if (header->num_tokens < 0 || header->num_tokens > mine.max_tokens)
    ok = ll_fail(ll, kBadData, peer, 0, mine.max_tokens, header->num_tokens);
  else if ((header->mask >> comm.rank & 1u) != 0)
    ok = ll_fail(ll, kMasked, peer, 0, 0, 1);
  for (int rank = 0; ok && ll.op.shrink != 0 && rank < comm.num_ranks; ++rank)
    if ((header->mask >> rank & 1u) != 0) ptx::st_relaxed_gpu(&ll.state().mask[rank], 1);
  return ok ? Found::kThere : Found::kGaveUp;
}

// An id as the caller gave it. What is no expert is recorded, and counts as dropped.
__device__ inline int ll_id(const LlRun& ll, Address ids, int id_bytes, int pair) {
  const int64_t id = id_bytes == 8 ? at<const int64_t>(ids)[pair] : at<const int32_t>(ids)[pair];
  if (id >= -1 && id < ll.op.comm.num_experts) return static_cast<int>(id);
  ll_fail(ll, kBadIds, ll.op.comm.rank, pair / ll.op.header.topk, ll.op.comm.num_experts, id);
  return -1;
}
// All lanes: bit r: rank r has one of the token's experts and is not masked.
__device__ inline uint32_t ll_ranks_of(const LlRun& ll, Address ids, int id_bytes, int token) {
  const int K = ll.op.header.topk;
  const unsigned per_rank = static_cast<unsigned>(local_experts(ll.op.comm));
  uint32_t bits = 0;
#pragma unroll 1
  for (int k = lane_id(); k < K; k += kWarp) {
    const int id = ll_id(ll, ids, id_bytes, token * K + k);
    if (id >= 0) bits |= 1u << static_cast<unsigned>(id) / per_rank;
  }
  for (int step = 1; step < kWarp; step *= 2) bits |= __shfl_xor_sync(kAllLanes, bits, step);
  return bits & ~ll.masked;
}

}  // namespace ep::cuda
