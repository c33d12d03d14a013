// The send half of low-latency dispatch. ll_dispatch.cu describes roles and memory order.
#pragma once
#include <type_traits>

#include "cuda/core/quantize.cuh"
#include "cuda/moe/ll_words.cuh"

namespace ep::cuda {

// --- Words: header and ids -----------------------------------------------------------------------------------------

// Returns word `word` of this rank's ids; -1 in the place of a pair that does not exist. With `copy`, also writes the
// handle's copy of the ids.
__device__ inline LlData ids_word(const LlRun& ll, const LlDispatchArgs& args, int word, bool copy) {
  const int pairs = ll.op.header.num_tokens * ll.op.header.topk, first = word * kLlIdsPerWord;
  int64_t ids[kLlIdsPerWord];  // loaded together
#pragma unroll
  for (int i = 0; i < kLlIdsPerWord; ++i)
    ids[i] = first + i < pairs ? ll_load_id(args.ids, args.id_bytes, first + i) : -1;
  LlData data{};
#pragma unroll
  for (int i = 0; i < kLlIdsPerWord; ++i) {
    const int id = ll_checked_id(ll, ids[i], first + i);
    if (copy && args.topk_ids != 0 && first + i < pairs) at<int32_t>(args.topk_ids)[first + i] = id;
    data.unit[i / 2] |= (static_cast<uint32_t>(id) & 0xFFFFu) << 16 * (i % 2);
  }
  return data;
}

// All workers of the kernel: send this rank's header and ids to every peer, the next rank first.
__device__ inline void send_ids(const LlRun& ll, const LlDispatchArgs& args) {
  const LlHeader& header = ll.op.header;
  const int R = ll.op.comm.num_ranks, me = ll.op.comm.rank;
  const int words = kLlHeaderWords + ll_sent_id_words(header, header.num_tokens);
  const Team team = team_of_workers();
#pragma unroll 1
  for (int i = static_cast<int>(team.index) * kWarp + lane_id(); i < words * R;
       i += static_cast<int>(team.size) * kWarp) {
    const int turn = i / words, word = i % words, peer = (me + 1 + turn) % R;
    const LlData data =
        word < kLlHeaderWords ? ll_header_word(ll, word) : ids_word(ll, args, word - kLlHeaderWords, turn == 0);
    if (!ll.is_masked(peer)) ll_store(ll.block(peer).ids(ll.parity, me) + word, data, ll.tag());
  }
#pragma unroll 1
  for (int peer = lane_id(); team.index == team.size - 1 && peer < R; peer += kWarp)
    if (!ll.is_masked(peer))
      ll_refresh(ll, ll.block(peer).ids(ll.parity, me), ll.lay.id_words, [=](int index) { return index < words; });
  __syncwarp();
}

// --- Rows ----------------------------------------------------------------------------------------------------------

// In place of an element type: rows travel as they are.
struct AsTheyAre {};

constexpr int kUnitBytes = 16;                           // bytes of a unit of an image
constexpr int kUnitsOfBlock = kScaleBlock / kUnitBytes;  // lanes that share a scale block

// The elements of one unit of a quantised image.
template <class From>
struct Elements {
  static constexpr int kVectors = kUnitBytes / From::kPerVector;
  int4 vectors[kVectors];

  // Zeros if the row has no such unit.
  __device__ __forceinline__ Elements(const char* row, int unit, bool in) {
    const int4* from = reinterpret_cast<const int4*>(row) + int64_t{unit} * kVectors;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) vectors[v] = in ? ptx::ld_coherent(from + v) : make_int4(0, 0, 0, 0);
  }

  // All lanes: returns the scale of the block, which kUnitsOfBlock lanes share.
  __device__ __forceinline__ float scale(bool pow2) const {
    float most = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[From::kPerVector];
      From::magnitudes(vectors[v], values);
#pragma unroll
      for (int i = 0; i < From::kPerVector; ++i) most = fmaxf(most, values[i]);
    }
#pragma unroll
    for (int apart = 1; apart < kUnitsOfBlock; apart *= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, apart));
    const float exact = e4m3_scale(most);
    return pow2 ? pow2_scale(exact) : exact;
  }

  __device__ __forceinline__ int4 quantized(float scale) const {
    constexpr int kWords = From::kPerVector / 4;
    const Divisor divisor(scale);
    int words[4];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float values[From::kPerVector];
      From::magnitudes(vectors[v], values);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const float* four = values + 4 * w;
        const uint32_t low = ptx::to_e4m3x2(divisor.divide(four[0]), divisor.divide(four[1]));
        const uint32_t high = ptx::to_e4m3x2(divisor.divide(four[2]), divisor.divide(four[3]));
        const uint32_t signs = From::signs(vectors[v], w) & 0x80808080u;
        words[v * kWords + w] = static_cast<int>(((low | high << 16) & 0x7F7F7F7Fu) | signs);
      }
    }
    return make_int4(words[0], words[1], words[2], words[3]);
  }
};

// The addresses of a token's image: slots of ranks.
struct Images {
  const LlRun& ll;
  int token;
  uint32_t ranks;  // in lane w: the w-th word of 32 ranks
  int64_t offset;  // the slot's offset in a block

  __device__ __forceinline__ Images(const LlRun& ll, const LlDispatchArgs& args, int token)
      : ll(ll),
        token(token),
        ranks(0),
        offset(ll.own().slot(ll.kind, ll.parity, ll.op.comm.rank, token) - at<char>(ll.own().base)) {
#pragma unroll 1
    for (int base = 0; base < ll.op.comm.num_ranks; base += kWarp) {
      const uint32_t word = ll_ranks_of(ll, args.ids, args.id_bytes, token, base);
      if (lane_id() == base / kWarp) ranks = word;
    }
  }

  // All lanes: calls store(image) for each of them. In each word the rank that comes first depends on this rank and on
  // the token.
  template <class Store>
  __device__ __forceinline__ void each(Store store) const {
    const int R = ll.op.comm.num_ranks;
#pragma unroll 1
    for (int base = 0; base < R; base += kWarp) {
      const uint32_t word = __shfl_sync(kAllLanes, ranks, base / kWarp);
      const int count = min(R - base, kWarp), first = (ll.op.comm.rank + 1 + token) % count;
#pragma unroll 1
      for (int turn = 0, rank = first; turn < count; ++turn, rank = rank + 1 == count ? 0 : rank + 1)
        if ((word >> rank & 1u) != 0) store(at<char>(ll.peers->block[base + rank], offset));
    }
  }
};

// Units that a lane makes at a time.
template <class From>
constexpr int kLaneUnits = std::is_same_v<From, AsTheyAre> ? 2 : 1;

// All lanes: makes a piece of a token's image, kLaneUnits units in each lane, and stores them and their scales. find()
// returns the Images; it is called while the loads of the row are in flight.
template <class From, class Find>
__device__ __forceinline__ void make_piece(const LlHeader& header, const char* row, int piece, Find find) {
  constexpr int kUnits = kLaneUnits<From>;
  const int unit = piece * kUnits * kWarp + lane_id(), units = header.row_bytes / kUnitBytes;
  if constexpr (std::is_same_v<From, AsTheyAre>) {
    int4 held[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (unit + u * kWarp < units) held[u] = ptx::ld_coherent(reinterpret_cast<const int4*>(row) + unit + u * kWarp);
    find().each([&](char* image) {
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        if (unit + u * kWarp < units) reinterpret_cast<int4*>(image)[unit + u * kWarp] = held[u];
    });
  } else {
    const bool in = unit < units;
    const Elements<From> elements(row, unit, in);
    const Images images = find();
    const float scale = elements.scale(header.format != kLlE4m3);
    const int4 held = elements.quantized(scale);
    const int block = unit / kUnitsOfBlock;
    const bool exponents = header.format == kLlE4m3Ue8m0, first = unit % kUnitsOfBlock == 0;
    const int scales = static_cast<int>(ceil_div(header.row_bytes, kScaleBlock));
    images.each([&](char* image) {
      if (in) reinterpret_cast<int4*>(image)[unit] = held;
      char* to = image + header.row_bytes;
      if (exponents && first && block < header.scale_bytes)
        to[block] = static_cast<char>(block < scales ? ue8m0_of(scale) : 0);
      if (!exponents && first && block < scales) reinterpret_cast<float*>(to)[block] = scale;
    });
  }
}

template <class From>
__device__ __forceinline__ int pieces_of(const LlHeader& header) {
  constexpr int kBytes = kLaneUnits<From> * kWarp * kUnitBytes;
  return (header.row_bytes + kBytes - 1) / kBytes;
}

__device__ __forceinline__ const char* row_of(const LlDispatchArgs& args, int token) {
  return at<const char>(args.x, token * args.x_stride);
}

// The groups of this rank's tokens, as a CTA sends them.
__device__ inline Batches sent_batches(const LlHeader& header) {
  return Batches(ll_groups(header.num_tokens), ll_group_tokens(header.num_tokens));
}

// Workers: store the rows of this CTA's groups to the slots of all ranks that need them.
template <class From>
__device__ void send_rows_to_slots(const LlRun& ll, const LlDispatchArgs& args, int32_t* written) {
  const LlHeader& header = ll.op.header;
  const int pieces = pieces_of<From>(header);
  const Batches batches = sent_batches(header);
  for (int batch = 0; batch < batches.count(); ++batch) {
#pragma unroll 1
    for (int task = warp_id(); task < batches.places() * pieces; task += num_workers()) {
      const int place = task / pieces, piece = task - place * pieces;
      const int item = batches.item(batch, place / batches.per_item);
      const int token = item * batches.per_item + place % batches.per_item;
      if (item >= batches.items || token >= header.num_tokens) continue;
      make_piece<From>(header, row_of(args, token), piece, [&] { return Images(ll, args, token); });
    }
    count_written(written);
  }
}

// The signalling warp: stores the flags of this CTA's groups.
__device__ inline void signal_rows(const LlRun& ll, const LlDispatchArgs& args, int32_t* written) {
  const int T = ll.op.header.num_tokens;
  const Batches batches = sent_batches(ll.op.header);
#pragma unroll 1
  for (int batch = 0; batch < batches.count(); ++batch) {
#pragma unroll 1
    for (int base = 0; base < ll.op.comm.num_ranks; base += kWarp) {
      uint32_t ranks = 0;  // in lane i: the ranks of the batch's i-th group
#pragma unroll 1
      for (int i = 0; i < batches.per_batch; ++i) {
        const int item = batches.item(batch, i), end = min(T, (item + 1) * batches.per_item);
        uint32_t of_group = 0;
#pragma unroll 1
        for (int token = item * batches.per_item; item < batches.items && token < end; ++token)
          of_group |= ll_ranks_of(ll, args.ids, args.id_bytes, token, base);
        if (lane_id() == i) ranks = of_group;
      }
      if (base == 0 && !fence_batch(ll, written, batch)) return;
#pragma unroll 1
      for (int i = 0; i < batches.per_batch; ++i)
        signal_group(ll, base, __shfl_sync(kAllLanes, ranks, i), batches.item(batch, i));
    }
  }
}

}  // namespace ep::cuda
