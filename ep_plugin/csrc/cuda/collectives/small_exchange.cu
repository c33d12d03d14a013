// All-gather and reduce-scatter of small shards inside a node: one kernel, without a handshake.
//
// Each 16-byte store brings 12 bytes of a shard and a flag, which says to which operation they belong. A reader needs
// nothing but the word. Words go to memory that only this kernel uses, never to outputs. So a rank may write before its
// peers have begun the operation, and peers need not map outputs.
//
// Roles. Each CTA sends words to one peer. In a gather it receives the words of that peer; in a sum each thread
// receives a word of every rank, and sums them in rank order. The first CTA of each peer also expires words.
// Buffers. words[rank] is FlaggedWord [parity of the operation's number][source][word]. So an operation overwrites the
// words of the last operation but one. By then those have been read: a rank starts an operation after it has received
// words of the previous one from every peer, and a peer sends these after its kernel before has ended. A flag has only
// the low bits of the number, which repeat, so readers expire words that no operation has used for long.
// Agreement. The flag has the size of a shard and the element type, too. A peer whose shard is not small signals its
// size (signal_size in barrier.cuh).
// Co-residency. The kernel both sends and waits, so it is launched cooperatively.
// Memory order. Stores and loads of words are relaxed, and each word is complete by itself. Nothing else is ordered.
// After a fault. Outputs are filled with 0xFF bytes.
#include "cuda/collectives/barrier.cuh"
#include "cuda/core/copy.cuh"
#include "cuda/core/element.cuh"

namespace ep::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 2;        // words that one thread loads at a time
constexpr int kTerms = 4;           // ranks whose words are received at a time in a sum
constexpr int kPollsPerCheck = 16;  // polls between two checks of the deadline
static_assert(kGroupWords == kWarp, "a warp's lanes load and store units side by side");

// In place of an element type: a gather.
struct NoSum {};

// The units of one word; zeros beyond the end of the shard.
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

// Whether all units of a word are aligned and within the shard. This holds for most words.
__device__ __forceinline__ bool is_whole(Address shard, int64_t first, int64_t bytes) {
  return shard % kUnitBytes == 0 && (first + (kWordUnits - 1) * kGroupWords + 1) * kUnitBytes <= bytes;
}
__device__ __forceinline__ Units load_units(Address shard, int word, int64_t bytes) {
  const int64_t first = first_unit_of(word);
  Units units;
  if (is_whole(shard, first, bytes)) {
#pragma unroll
    for (int u = 0; u < kWordUnits; ++u) units.unit[u] = at<const uint32_t>(shard)[first + u * kGroupWords];
    return units;
  }
#pragma unroll
  for (int u = 0; u < kWordUnits; ++u) units.unit[u] = load_unit(shard, (first + u * kGroupWords) * kUnitBytes, bytes);
  return units;
}
__device__ __forceinline__ void store_units(Address shard, int word, int64_t bytes, const Units& units) {
  const int64_t first = first_unit_of(word);
  if (is_whole(shard, first, bytes)) {
#pragma unroll
    for (int u = 0; u < kWordUnits; ++u) at<uint32_t>(shard)[first + u * kGroupWords] = units.unit[u];
    return;
  }
#pragma unroll
  for (int u = 0; u < kWordUnits; ++u) store_unit(shard, (first + u * kGroupWords) * kUnitBytes, bytes, units.unit[u]);
}

__device__ __forceinline__ uint64_t both(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}
__device__ __forceinline__ void store_word(FlaggedWord* to, const Units& units, uint32_t flag) {
  peer::store(to, both(units.unit[0], units.unit[1]), both(units.unit[2], flag));
}
// Loads a word and returns its flag.
__device__ __forceinline__ uint32_t load_word(const FlaggedWord* from, Units* units) {
  uint64_t low, high;
  peer::poll(from, &low, &high);
  units->unit[0] = static_cast<uint32_t>(low);
  units->unit[1] = static_cast<uint32_t>(low >> 32);
  units->unit[2] = static_cast<uint32_t>(high);
  return static_cast<uint32_t>(high >> 32);
}

// A word to receive from a peer. source -1: none.
struct Item {
  int source;
  int word;
};

// The words of one operation, as one thread uses them. A shard has `count` words. Each CTA serves one peer. The CTAs of
// a peer share its words: a thread begins with word `first` and goes on in steps of `step`.
struct Words {
  const SmallExchangeArgs& args;
  const Run& run;
  const int count;
  const int peer;
  const Address of_peer;  // the peer's words
  const int first;
  const int step;
  const uint64_t number;  // of the operation, among small ones
  const uint32_t flag;

  __device__ Words(const SmallExchangeArgs& args, const Run& run, uint64_t number, int peer, Address of_peer)
      : args(args),
        run(run),
        count(static_cast<int>(words_of(args.bytes))),
        peer(peer),
        of_peer(of_peer),
        first(static_cast<int>(blockIdx.x) / (args.comm.num_ranks - 1) * kThreads + static_cast<int>(threadIdx.x)),
        step(static_cast<int>(gridDim.x) / (args.comm.num_ranks - 1) * kThreads),
        number(number),
        flag(small_flag(number, args.bytes, args.element)) {}

  // The words of `source`, among the words of one rank.
  __device__ FlaggedWord* from(int source, Address words) const {
    const int R = args.comm.num_ranks;
    return at<FlaggedWord>(words) + (static_cast<int64_t>(number % 2) * R + source) * small_capacity(R);
  }

  // Whether `seen` is this operation's flag. An older operation's flag is ignored. Another flag of this number means
  // that ranks disagree: a fault, and `ok` becomes false.
  __device__ bool is_there(uint32_t seen, int source, bool* ok) const {
    if (seen == flag) return true;
    if (is_of_number(seen, number)) {
      const int64_t bytes = small_bytes(seen), element = small_element(seen);
      *ok = bytes != args.bytes ? fail(run.comm, kDisagree, run.step, source, 1, args.bytes, bytes)
                                : fail(run.comm, kDisagree, run.step, source, 2, args.element, element);
    }
    return false;
  }

  // Waits for the words of these items. False after a fault.
  template <int kItems>
  __device__ bool receive(const Item (&items)[kItems], Units (&units)[kItems], Deadline* deadline) const {
    for (int polls = 1;; ++polls) {
      uint32_t seen[kItems];
#pragma unroll
      for (int v = 0; v < kItems; ++v) {
        seen[v] = flag;
        if (items[v].source >= 0) seen[v] = load_word(from(items[v].source, args.own_words) + items[v].word, &units[v]);
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
      if (polls % kPollsPerCheck == 0 &&
          (!check_size(run, missing, args.bytes) || !deadline->keep_waiting(run, missing, 0, run.epoch, 0)))
        return false;
    }
  }
};

__device__ void send_words(const Words& words) {
  const SmallExchangeArgs& args = words.args;
  const Address shard = args.element < 0 ? args.own : args.shards[words.peer];
  FlaggedWord* to = words.from(args.comm.rank, words.of_peer);
  for (int first = words.first; first < words.count; first += kInFlight * words.step) {
    Units units[kInFlight];
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * words.step < words.count) units[v] = load_units(shard, first + v * words.step, args.bytes);
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (first + v * words.step < words.count) store_word(to + first + v * words.step, units[v], words.flag);
  }
}

// The first CTA of each peer overwrites some words of that peer that this operation does not use. They get a flag of
// the other parity, which no operation that reads them has.
__device__ void expire_words(const Words& words) {
  const int R = words.args.comm.num_ranks, at_once = static_cast<int>(expired_at_once(R));
  if (static_cast<int>(blockIdx.x) >= R - 1 || static_cast<int>(threadIdx.x) >= at_once) return;
  const int word = static_cast<int>(words.number / 2 % kExpiries) * at_once + static_cast<int>(threadIdx.x);
  if (word >= words.count && word < small_capacity(R))
    store_word(words.from(words.peer, words.args.own_words) + word, Units{}, words.flag ^ (1u << kNumberShift));
}

__device__ bool gather_words(const Words& words) {
  const SmallExchangeArgs& args = words.args;
  const Address shard = args.shards[words.peer];
  Deadline deadline;
  for (int first = words.first; first < words.count; first += kInFlight * words.step) {
    Item items[kInFlight];
    Units units[kInFlight];
#pragma unroll
    for (int v = 0; v < kInFlight; ++v) {
      const int word = first + v * words.step;
      items[v] = Item{word < words.count ? words.peer : -1, word};
    }
    if (!words.receive(items, units, &deadline)) return false;
#pragma unroll
    for (int v = 0; v < kInFlight; ++v)
      if (items[v].source >= 0) store_units(shard, items[v].word, args.bytes, units[v]);
  }
  return true;
}

// Elements are summed as vectors of 16 bytes, of which a word fills 12.
__device__ __forceinline__ int4 vector_of(const Units& units) {
  return make_int4(static_cast<int>(units.unit[0]), static_cast<int>(units.unit[1]), static_cast<int>(units.unit[2]),
                   0);
}
__device__ __forceinline__ Units units_of(int4 vector) {
  return Units{{static_cast<uint32_t>(vector.x), static_cast<uint32_t>(vector.y), static_cast<uint32_t>(vector.z)}};
}

// Sums words in rank order, so that the same inputs give the same bits. Receives a word from kTerms ranks at a time.
template <class Element>
__device__ bool sum_words(const Words& words) {
  const SmallExchangeArgs& args = words.args;
  const int R = args.comm.num_ranks, rank = args.comm.rank;
  const float scale = static_cast<float>(args.scale);
  Deadline deadline;
  const int begin = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  for (int word = begin; word < words.count; word += static_cast<int>(gridDim.x * kThreads)) {
    float sums[Element::kPerVector] = {};
    const Units mine = load_units(args.shards[rank], word, args.bytes);
    for (int first = 0; first < R; first += kTerms) {
      Item items[kTerms];
      Units units[kTerms];
#pragma unroll
      for (int v = 0; v < kTerms; ++v) items[v] = Item{first + v < R && first + v != rank ? first + v : -1, word};
      if (!words.receive(items, units, &deadline)) return false;
#pragma unroll
      for (int v = 0; v < kTerms; ++v) {
        if (first + v >= R) continue;
        const Units& term = first + v == rank ? mine : units[v];
        Element::add(sums, vector_of(term), 1.0f);
      }
    }
    if (scale != 1.0f)
      for (float& sum : sums) sum *= scale;
    store_units(args.own, word, args.bytes, units_of(Element::narrow(sums)));
  }
  return true;
}

// Every CTA that fails calls it, because others may succeed.
__device__ void poison(const SmallExchangeArgs& args) {
  if (args.element >= 0) return fill_bytes(args.own, args.bytes, 0xFF, threadIdx.x, blockDim.x);
  for (int r = 0; r < args.comm.num_ranks; ++r)
    if (r != args.comm.rank) fill_bytes(args.shards[r], args.bytes, 0xFF, threadIdx.x, blockDim.x);
}

template <class Sum>
__global__ void __launch_bounds__(kThreads, 1) ep_small_exchange(const __grid_constant__ SmallExchangeArgs args) {
  constexpr bool kGathers = std::is_same<Sum, NoSum>::value;
  // Both load while the CTA joins.
  const uint64_t number = device_control(args.comm, args.comm.rank).small_operations + 1;
  const int ranks = args.comm.num_ranks,
            peer = (args.comm.rank + 1 + static_cast<int>(blockIdx.x) % (ranks - 1)) % ranks;
  const Address of_peer = address_in(args.words, peer);
  const Run run = enter_collective(args.comm, kGathers ? kAllGather : kReduceScatter);
  bool ok = run.ok;
  if (ok) {
    const Words words(args, run, number, peer, of_peer);
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
  if (leave_collective(run, ok)) device_control(args.comm, args.comm.rank).small_operations = number;
}

template <class Sum>
void launch_small_exchange(const SmallExchangeArgs& args) {
  launch_cooperatively<ep_small_exchange<Sum>>("small shards", args.num_ctas, kThreads, 0, args.stream, args);
}

}  // namespace

void small_exchange(const SmallExchangeArgs& args) {
  require_node(args.comm);
  require(args.bytes > 0 && args.bytes <= kSmallBytes / args.comm.num_ranks, "bytes", "1 to 1 MiB / num_ranks",
          args.bytes);
  require(args.num_ctas >= 1 && args.num_ctas % (args.comm.num_ranks - 1) == 0, "num_ctas",
          "a multiple of num_ranks - 1", args.num_ctas);
  switch (args.element) {
    case -1:
      return launch_small_exchange<NoSum>(args);
    case kFloat32:
      return launch_small_exchange<Float32>(args);
    case kBFloat16:
      return launch_small_exchange<BFloat16>(args);
    case kFloat16:
      return launch_small_exchange<Float16>(args);
    default:
      require(false, "element", "-1 to 2 on CUDA", args.element);
  }
}

}  // namespace ep::cuda
