// Words in the blocks of ranks, and the data that travels in them: headers, and ids as the caller gave them.
// common/low_latency.h has their layout.
#pragma once
#include <cstddef>

#include "cuda/moe/low_latency.cuh"

namespace ep::cuda {

constexpr int kLlWordUnits = 3;                             // 4-byte units of data in a word
constexpr int kLlMaskField = offsetof(LlHeader, mask) / 4;  // and those after it

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

// Loads kWords consecutive words; their loads are in flight together. Returns whether all have this operation's tag.
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
// One thread: waits for such words. polls: polls before it looks for faults and at its deadline.
template <int kWords>
__device__ __forceinline__ Found ll_wait_words(const LlRun& ll, int peer, const LlWord* from, LlData* data,
                                               int polls = 1) {
  if (ll.is_masked(peer)) return Found::kMasked;
  uint64_t seen = 0;
#pragma unroll 1
  do {
    if (ll_load_words<kWords>(ll, from, data, &seen)) return Found::kThere;
  } while (--polls > 0);
  const Found found = ll_wait_longer(ll, peer, Awaited{from, ll.tag(), kWords});
  ll_load_words<kWords>(ll, from, data, &seen);
  return found;
}

// How many words of ids a rank with T tokens sends to a peer.
__device__ __forceinline__ int ll_sent_id_words(const LlHeader& header, int num_tokens) {
  return max(ll_early_words(header.max_tokens, header.topk), static_cast<int>(ll_id_words(num_tokens, header.topk)));
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
    data.unit[u] = field < kLlMaskField ? static_cast<uint32_t>(fields[field]) : ll.peers->masked[field - kLlMaskField];
  }
  return data;
}

// One thread: refreshes one of `count` words, unless this operation writes it anyway (low_latency.h: ll_refreshed).
template <class IsWritten>
__device__ inline void ll_refresh(const LlRun& ll, LlWord* words, int64_t count, IsWritten is_written) {
  const int64_t index = ll_refreshed(ll.run.epoch, count);
  if (!is_written(static_cast<int>(index))) ll_store(words + index, LlData{}, ll.tag());
}
// One thread: waits for a peer's header, compares it with this rank's, and adopts its masks.
static __device__ EP_NOINLINE Found ll_open(const LlRun ll, int peer, const LlWord* words, LlHeader* header) {
  const Comm& comm = ll.op.comm;
  const LlHeader& mine = ll.op.header;
  LlData data[kLlHeaderWords];
  const Found found = ll_wait_words<kLlHeaderWords>(ll, peer, words, data, ll.polls());
  if (found != Found::kThere) return found;
  memcpy(header, data, sizeof(LlHeader));
  bool ok = true;
  const int field = ll_header_mismatch(mine, *header);
  if (field >= 0)
    ok = ll_fail(ll, kDisagree, peer, field, reinterpret_cast<const int32_t*>(&mine)[field],
                 reinterpret_cast<const int32_t*>(header)[field]);
  else if (header->num_tokens < 0 || header->num_tokens > mine.max_tokens)
    ok = ll_fail(ll, kBadData, peer, 0, mine.max_tokens, header->num_tokens);
  else if (has_rank(header->mask, comm.rank))
    ok = ll_fail(ll, kMasked, peer, 0, 0, 1);
  for (int rank = 0; ok && ll.op.shrink != 0 && rank < comm.num_ranks; ++rank)
    if (has_rank(header->mask, rank)) ptx::st_relaxed_gpu(&ll.state().mask[rank], 1);
  return ok ? Found::kThere : Found::kGaveUp;
}

// Loads an id as the caller gave it. An id that is no expert is recorded, and counts as dropped.
__device__ __forceinline__ int64_t ll_load_id(Address ids, int id_bytes, int pair) {
  return id_bytes == 8 ? at<const int64_t>(ids)[pair] : at<const int32_t>(ids)[pair];
}
__device__ __forceinline__ int ll_checked_id(const LlRun& ll, int64_t id, int pair) {
  if (id >= -1 && id < ll.op.comm.num_experts) return static_cast<int>(id);
  ll_fail(ll, kBadIds, ll.op.comm.rank, pair / ll.op.header.topk, ll.op.comm.num_experts, id);
  return -1;
}
__device__ inline int ll_id(const LlRun& ll, Address ids, int id_bytes, int pair) {
  return ll_checked_id(ll, ll_load_id(ids, id_bytes, pair), pair);
}
// All lanes: returns a word of bits for the ranks from `base` on, a multiple of 32. Bit r: rank base + r has one of the
// token's experts and is not masked.
__device__ inline uint32_t ll_ranks_of(const LlRun& ll, Address ids, int id_bytes, int token, int base) {
  const int K = ll.op.header.topk;
  const unsigned per_rank = static_cast<unsigned>(local_experts(ll.op.comm));
  uint32_t bits = 0;
#pragma unroll 1
  for (int k = lane_id(); k < K; k += kWarp) {
    const int id = ll_id(ll, ids, id_bytes, token * K + k);
    const unsigned rank = static_cast<unsigned>(id) / per_rank - static_cast<unsigned>(base);
    if (id >= 0 && rank < kWarp) bits |= 1u << rank;
  }
  for (int step = 1; step < kWarp; step *= 2) bits |= __shfl_xor_sync(kAllLanes, bits, step);
  return bits & ~ll.peers->masked[base / kWarp];
}

}  // namespace ep::cuda
