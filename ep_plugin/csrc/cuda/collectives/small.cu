// All-gather and reduce-scatter of small shards inside a node: one kernel and no handshake.
//
// Every 12 bytes travel in one 16-byte store, together with a flag that says which operation they belong to. A reader
// needs only the word itself. Words land in memory that only this kernel uses, never in outputs, so there is nothing to
// ask a peer for first, and outputs need not be mapped.
// Buffers. The words of an operation depend on the parity of its number, so they are overwritten by the next operation
// but one. That is safe: a rank that starts it has received words of the operation in between from every peer, and a
// peer starts that one only when its own kernel of the operation before has ended and read its words. A flag holds only
// the low bits of the number, which repeat. So the rank that reads words expires those that no operation has used for
// long.
// Agreement. The flag also holds the size and the element type. If a peer's shard is not small, a Sign says its size
// (barrier.cuh).
// Co-residency. The kernel both sends and waits, and is launched cooperatively.
// Memory order. Stores and loads of 16 bytes are relaxed and complete by themselves. Nothing else is ordered.
#include "cuda/collectives/barrier.cuh"
#include "cuda/core/copy.cuh"
#include "cuda/core/element.cuh"

namespace ep::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kAhead = 2;   // words of one thread under way
constexpr int kTerms = 4;   // of a sum
constexpr int kLooks = 16;  // polls between two checks of the deadline
static_assert(kWordsAbreast == kWarp, "a warp's lanes load and store units side by side");

// A gather sums nothing.
struct NoSum {};

// What a word carries of a shard; zeros beyond its end.
struct Units {
  uint32_t unit[kWordUnits] = {};
};

__device__ __forceinline__ uint32_t load_unit(Address shard, int64_t begin, int64_t bytes) {
  if (shard % kUnitBytes == 0 && begin + kUnitBytes <= bytes) return *at<const uint32_t>(shard, begin);
  uint32_t value = 0;
#pragma unroll 1
  for (int64_t i = begin; i < min(begin + kUnitBytes, bytes); ++i)
    value |= static_cast<uint32_t>(*at<const unsigned char>(shard, i)) << 8 * (i - begin);
  return value;
}
__device__ __forceinline__ void store_unit(Address shard, int64_t begin, int64_t bytes, uint32_t value) {
  if (shard % kUnitBytes == 0 && begin + kUnitBytes <= bytes) {
    *at<uint32_t>(shard, begin) = value;
    return;
  }
#pragma unroll 1
  for (int64_t i = begin; i < min(begin + kUnitBytes, bytes); ++i)
    *at<unsigned char>(shard, i) = static_cast<unsigned char>(value >> 8 * (i - begin));
}

// All units of a word are aligned and within the shard, as most are.
__device__ __forceinline__ bool is_whole(Address shard, int64_t first, int64_t bytes) {
  return shard % kUnitBytes == 0 && (first + (kWordUnits - 1) * kWordsAbreast + 1) * kUnitBytes <= bytes;
}
__device__ __forceinline__ Units load_units(Address shard, int word, int64_t bytes) {
  const int64_t first = first_unit_of(word);
  Units units;
  if (is_whole(shard, first, bytes)) {
#pragma unroll
    for (int u = 0; u < kWordUnits; ++u) units.unit[u] = at<const uint32_t>(shard)[first + u * kWordsAbreast];
    return units;
  }
#pragma unroll
  for (int u = 0; u < kWordUnits; ++u)
    units.unit[u] = load_unit(shard, (first + u * kWordsAbreast) * kUnitBytes, bytes);
  return units;
}
__device__ __forceinline__ void store_units(Address shard, int word, int64_t bytes, const Units& units) {
  const int64_t first = first_unit_of(word);
  if (is_whole(shard, first, bytes)) {
#pragma unroll
    for (int u = 0; u < kWordUnits; ++u) at<uint32_t>(shard)[first + u * kWordsAbreast] = units.unit[u];
    return;
  }
#pragma unroll
  for (int u = 0; u < kWordUnits; ++u)
    store_unit(shard, (first + u * kWordsAbreast) * kUnitBytes, bytes, units.unit[u]);
}

__device__ __forceinline__ uint64_t both(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}
__device__ __forceinline__ void store_word(FlaggedWord* to, const Units& units, uint32_t flag) {
  peer::store(to, both(units.unit[0], units.unit[1]), both(units.unit[2], flag));
}
// The flag of what lies there.
__device__ __forceinline__ uint32_t load_word(const FlaggedWord* from, Units* units) {
  uint64_t low, high;
  peer::poll(from, &low, &high);
  units->unit[0] = static_cast<uint32_t>(low);
  units->unit[1] = static_cast<uint32_t>(low >> 32);
  units->unit[2] = static_cast<uint32_t>(high);
  return static_cast<uint32_t>(high >> 32);
}

// A word from a peer. source -1: none.
struct Item {
  int source;
  int word;
};

// One operation's view of the words, `count` of which make a shard. Every CTA sends to and gathers from one peer; the
// CTAs of a peer take its words in turns, `step` of them at a time.
struct Words {
  const SmallArgs& args;
  const Run& run;
  const int count;
  const int peer;
  const int first;
  const int step;
  const uint64_t number;  // of the operation, among small ones
  const uint32_t flag;

  __device__ Words(const SmallArgs& args, const Run& run, uint64_t number)
      : args(args),
        run(run),
        count(static_cast<int>(words_of(args.bytes))),
        peer((args.comm.rank + 1 + static_cast<int>(blockIdx.x) % (args.comm.num_ranks - 1)) % args.comm.num_ranks),
        first(static_cast<int>(blockIdx.x) / (args.comm.num_ranks - 1) * kThreads + static_cast<int>(threadIdx.x)),
        step(static_cast<int>(gridDim.x) / (args.comm.num_ranks - 1) * kThreads),
        number(number),
        flag(small_flag(number, args.bytes, args.element)) {}

  __device__ FlaggedWord* at_rank(int owner, int source) const {
    const int R = args.comm.num_ranks;
    return at<FlaggedWord>(args.words[owner]) + (static_cast<int64_t>(number % 2) * R + source) * small_capacity(R);
  }

  // Whether `seen` is this operation's flag. It may be an older one's; another of this number is a disagreement.
  __device__ bool is_there(uint32_t seen, int source, bool* ok) const {
    if (seen == flag) return true;
    if (is_of_number(seen, number)) {
      const int64_t bytes = small_bytes(seen), element = small_element(seen);
      *ok = bytes != args.bytes ? fail(run.comm, kDisagree, run.step, source, 1, args.bytes, bytes)
                                : fail(run.comm, kDisagree, run.step, source, 2, args.element, element);
    }
    return false;
  }

  // What peers sent of these items; false if it does not come.
  template <int kItems>
  __device__ bool receive(const Item (&items)[kItems], Units (&units)[kItems], Patience* patience) const {
    for (int looks = 1;; ++looks) {
      uint32_t seen[kItems];
#pragma unroll
      for (int v = 0; v < kItems; ++v) {
        seen[v] = flag;
        if (items[v].source >= 0)
          seen[v] = load_word(at_rank(args.comm.rank, items[v].source) + items[v].word, &units[v]);
      }
      bool there = true, ok = true;
      int missing = 0;
#pragma unroll
      for (int v = 0; v < kItems; ++v) {
        if (is_there(seen[v], items[v].source, &ok)) continue;
        there = false;
        missing = items[v].source;
      }
      if (there) return true;
      if (!ok) return false;
      if (looks % kLooks == 0 &&
          (!check_size(run, missing, args.bytes) || !patience->keep_waiting(run, missing, 0, run.epoch, 0)))
        return false;
    }
  }
};

__device__ void send_words(const Words& words) {
  const SmallArgs& args = words.args;
  const Address shard = args.inputs[words.peer];
  FlaggedWord* to = words.at_rank(words.peer, args.comm.rank);
  for (int first = words.first; first < words.count; first += kAhead * words.step) {
    Units units[kAhead];
#pragma unroll
    for (int v = 0; v < kAhead; ++v)
      if (first + v * words.step < words.count) units[v] = load_units(shard, first + v * words.step, args.bytes);
#pragma unroll
    for (int v = 0; v < kAhead; ++v)
      if (first + v * words.step < words.count) store_word(to + first + v * words.step, units[v], words.flag);
  }
}

// The first CTA of each peer overwrites words that this operation does not use. They get the flag of a number of the
// other parity, which no operation that reads them has.
__device__ void expire_words(const Words& words) {
  const int R = words.args.comm.num_ranks, at_once = static_cast<int>(expired_at_once(R));
  if (static_cast<int>(blockIdx.x) >= R - 1 || static_cast<int>(threadIdx.x) >= at_once) return;
  const int word = static_cast<int>(words.number / 2 % kExpiries) * at_once + static_cast<int>(threadIdx.x);
  if (word >= words.count && word < small_capacity(R))
    store_word(words.at_rank(words.args.comm.rank, words.peer) + word, Units{}, words.flag ^ (1u << kNumberShift));
}

__device__ bool gather_words(const Words& words) {
  const SmallArgs& args = words.args;
  const Address shard = args.outputs[words.peer];
  Patience patience;
  for (int first = words.first; first < words.count; first += kAhead * words.step) {
    Item items[kAhead];
    Units units[kAhead];
#pragma unroll
    for (int v = 0; v < kAhead; ++v) {
      const int word = first + v * words.step;
      items[v] = Item{word < words.count ? words.peer : -1, word};
    }
    if (!words.receive(items, units, &patience)) return false;
#pragma unroll
    for (int v = 0; v < kAhead; ++v)
      if (items[v].source >= 0) store_units(shard, items[v].word, args.bytes, units[v]);
  }
  return true;
}

// Elements are summed by vectors of 16 bytes, the last 4 of which are none.
__device__ __forceinline__ int4 vector_of(const Units& units) {
  return make_int4(static_cast<int>(units.unit[0]), static_cast<int>(units.unit[1]), static_cast<int>(units.unit[2]),
                   0);
}
__device__ __forceinline__ Units units_of(int4 vector) {
  return Units{{static_cast<uint32_t>(vector.x), static_cast<uint32_t>(vector.y), static_cast<uint32_t>(vector.z)}};
}

// A word from kTerms ranks at a time, summed in rank order, so that the same inputs give the same bits.
template <class Element>
__device__ bool sum_words(const Words& words) {
  const SmallArgs& args = words.args;
  const int R = args.comm.num_ranks, rank = args.comm.rank;
  const float scale = static_cast<float>(args.scale);
  Patience patience;
  const int begin = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  for (int word = begin; word < words.count; word += static_cast<int>(gridDim.x * kThreads)) {
    float sums[Element::kPerVector] = {};
    const Units mine = load_units(args.inputs[rank], word, args.bytes);
    for (int first = 0; first < R; first += kTerms) {
      Item items[kTerms];
      Units units[kTerms];
#pragma unroll
      for (int v = 0; v < kTerms; ++v) items[v] = Item{first + v < R && first + v != rank ? first + v : -1, word};
      if (!words.receive(items, units, &patience)) return false;
#pragma unroll
      for (int v = 0; v < kTerms; ++v) {
        if (first + v >= R) continue;
        const Units& term = first + v == rank ? mine : units[v];
        Element::add(sums, vector_of(term), 1.0f);
      }
    }
    if (scale != 1.0f)
      for (float& sum : sums) sum *= scale;
    store_units(args.outputs[rank], word, args.bytes, units_of(Element::narrow(sums)));
  }
  return true;
}

// Every CTA that fails calls it; others may not fail.
__device__ void poison(const SmallArgs& args) {
  for (int r = 0; r < args.comm.num_ranks; ++r)
    if ((r == args.comm.rank) == (args.element >= 0))
      fill_bytes(args.outputs[r], args.bytes, 0xFF, threadIdx.x, blockDim.x);
}

template <class Sum>
__global__ void __launch_bounds__(kThreads, 1) ep_small(const __grid_constant__ SmallArgs args) {
  constexpr bool kGathers = std::is_same<Sum, NoSum>::value;
  const uint64_t number = device_control(args.comm, args.comm.rank).small + 1;  // on its way while the CTA joins
  const Run run = enter_collective(args.comm, kGathers ? kAllGather : kReduceScatter);
  bool ok = run.ok;
  if (ok) {
    const Words words(args, run, number);
    send_words(words);
    signal_size(run, args.bytes);
    expire_words(words);
    if constexpr (kGathers)
      ok = gather_words(words);
    else
      ok = sum_words<Sum>(words);
  }
  ok = __syncthreads_and(ok) != 0;
  if (!ok) poison(args);
  if (leave_collective(run, ok)) device_control(args.comm, args.comm.rank).small = number;
}

template <class Sum>
void launch_small(const SmallArgs& args) {
  launch_cooperatively<ep_small<Sum>>("small shards", args.num_ctas, kThreads, 0, args.stream, args);
}

}  // namespace

void small(const SmallArgs& args) {
  require_node(args.comm);
  require(args.bytes > 0 && args.bytes <= kSmallBytes / args.comm.num_ranks, "bytes", "at most a rank's share of 1 MiB",
          args.bytes);
  require(args.num_ctas >= 1 && args.num_ctas % (args.comm.num_ranks - 1) == 0, "num_ctas", "as many for each peer",
          args.num_ctas);
  switch (args.element) {
    case -1:
      return launch_small<NoSum>(args);
    case kFloat32:
      return launch_small<Float32>(args);
    case kBFloat16:
      return launch_small<BFloat16>(args);
    case kFloat16:
      return launch_small<Float16>(args);
    default:
      require(false, "element", "-1 to 2 on CUDA", args.element);
  }
}

}  // namespace ep::cuda
