// All-gather and reduce-scatter between the ranks of one node: what they share in memory, and their arguments.
//
// A piece is what one rank contributes: to all-gather its shard, to reduce-scatter one shard for each rank. Pieces move
// in chunks, as many for each rank, numbered through over all operations of a communicator. A piece in memory that
// peers map (a block) is offered as it lies; any other goes through the slots of its rank's control block.
#pragma once
#include <array>
#include <cstdint>

#include "common/api.h"
#include "common/board.h"

namespace ep {

constexpr int kSlots = 8;  // chunks that peers may lag behind
constexpr int64_t kSlotBytes = 256 * 1024;
constexpr int kMaxPeerBlocks = 64;  // blocks of a communicator are numbered below this: the bits of a word
// More than a rank's host can be ahead of another that reads them: each call ahead takes a block that the other has
// released.
constexpr int kRequests = 2 * kMaxPeerBlocks;

enum CollectiveOp : int64_t { kOpAllGather = 1, kOpReduceScatter = 2 };

// A rank's description of its piece, posted before the first chunk. The first words must be the same on all ranks.
struct Offer {
  int64_t op;
  int64_t bytes;              // of a shard
  int64_t element;            // of a sum, 0 without
  int64_t block;              // that holds the piece, or -1: it goes through the slots
  int64_t offset[kMaxRanks];  // in the block: of the shard, or of the shard for each rank
};
constexpr int kOfferFields = 3;

// The control block: one per rank, zero at birth, counters that only grow.
struct CollectiveControl {
  alignas(128) uint64_t posted;  // chunks that this rank has made available
  struct alignas(64) Word {
    uint64_t value;
  };
  alignas(128) Word consumed[kMaxRanks];  // chunks of this rank's that peer r has read; written by r
  alignas(128) uint64_t chunks;           // of all operations that are over, and how many those are; this rank's own
  uint64_t operations;
  alignas(
      128) Offer offers[kSlots];  // by the operation's number: an old one is read no more when its slot's turn comes
  alignas(128) char slots[kSlots][kSlotBytes];
};

// The chunks of a shard of `bytes`: all-gather fills a slot with one, reduce-scatter with one for each rank.
EP_HD constexpr int64_t gather_chunk_bytes() { return kSlotBytes; }
EP_HD constexpr int64_t scatter_chunk_bytes(int ranks) { return kSlotBytes / ranks / 64 * 64; }

// A rank's piece, and where peers find it.
struct Piece {
  int64_t bytes;  // of a shard
  int32_t block;  // that holds it, or -1
  int32_t num_blocks;
  int64_t offset[kMaxRanks];  // in the block, as in Offer
  Address blocks;             // u64 [num_blocks][kMaxRanks]: every rank's blocks as mapped here, 0: closed
  Address block_bytes;        // i64 [num_blocks]
};

// outputs[r]: where rank r's shard goes, in this rank's memory. This rank's own may be the input itself.
struct CpuAllGatherArgs {
  Comm comm;
  Piece piece;
  Address input;
  Address outputs[kMaxRanks];
};

// output = scale * the sum of all ranks' shards for this one, in float32 (float64 for float64) and in rank order.
// inputs[r]: this rank's shard for rank r. The output may be this rank's own shard in there.
struct CpuReduceScatterArgs {
  Comm comm;
  Piece piece;
  Address inputs[kMaxRanks];
  Address output;
  double scale;
  int32_t element;
  int32_t reserved;
};

// --- Requests for blocks, in host memory of each rank. A rank's requests and releases are ordered: a release that a
// peer sees before a request came before it.
struct Request {
  uint64_t number;  // stored last
  int64_t bytes;    // asked for
  uint64_t free;    // a bit for each block that nothing on this rank refers to any more
  uint64_t reserved;
};

struct Requests {
  Request rows[kRequests];            // by number
  uint64_t released[kMaxPeerBlocks];  // of how many uses of the block nothing is left
};

// uses: u64 [kMaxPeerBlocks], how often each block has been handed out. The caller keeps releases of this rank out.
void post_request(Address requests, uint64_t number, int64_t bytes, Address uses);
// Nothing refers to what the block was handed out for the `uses`-th time; may be said more than once.
void release_block(Address requests, int block, uint64_t uses);

// Whether a block that has been handed out `uses` times was free on a rank when that rank came to request `number`.
// Waits until the rank has released it or come there.
WaitResult was_free(Address requests, int block, uint64_t uses, uint64_t number, Address board, int64_t timeout_ns,
                    bool* free);

// --- Calls that hosts enqueue on devices: likewise a ring for each rank ----------------------------------------------
// Copy engines compare nothing. So hosts post their calls, and the host that posts a call second compares: none waits.
constexpr int kCallFields = 3;
using CallWords = std::array<int64_t, kCallFields>;  // bytes of a shard, element of a sum, place in peer memory
// More than a host can be ahead of another: a stream that waits for a peer takes no more before its host has to wait.
constexpr int kCalls = 1024;

struct Call {
  uint64_t number;  // stored last; 0 while the others change
  int64_t words[kCallFields];
};

struct CallDifference {
  int peer;
  int field;  // as in Offer
  int64_t mine;
  int64_t theirs;
};

// Posts this rank's call of this number, and compares it with those of the peers that have posted theirs. True when one
// differs. rings: Address [num_ranks].
bool post_call(Address rings, int num_ranks, int rank, uint64_t number, const CallWords& words, CallDifference* found);

// --- CUDA ------------------------------------------------------------------------------------------------------------
// Ranks send their shards to their peers' outputs, which are at the same place of the same block on all ranks. Other
// outputs go through the staging block, whose number is the last one.
constexpr int kStagingBlock = kMaxPeerBlocks;
constexpr int kMostCtas = 128;

// The signal of a peer's CTA to the CTA of the same index here (cuda/collectives/barrier.cuh).
struct alignas(16) Sign {
  uint64_t ready;  // epoch; stored after the place, and in one piece with ...
  int64_t bytes;   // ... those of a shard
  int64_t place;   // block and offset, see place_word
  uint64_t done;   // epoch
};

// Handshakes by stream memory operations, by block and peer: the number of the operation for which the peer's block may
// be written, and of the one whose shard the peer has written here. One per rank, in host memory: only there can the
// host end a wait while all of the device's queues stand behind it. The values are the host's: eager operations alone.
struct StreamWords {
  uint64_t ready[kMaxPeerBlocks + 1][kMaxRanks];
  uint64_t done[kMaxPeerBlocks + 1][kMaxRanks];
};

// Shards that are to be summed travel in chunks. The CTAs of one index on all ranks are a channel, which takes every
// num_ctas-th chunk. Each rank has slots for each source in each channel. Chunks are counted per channel, over all
// operations.
constexpr int kMostChannels = 64;
constexpr int kMostChannelSlots = 32;
constexpr int64_t kSumRowBytes = 2048;  // what a warp sums at a time
constexpr int kMostChunkRows = 8;
constexpr int64_t kChannelSlotBytes = kMostChunkRows * kSumRowBytes;
// Slots of a channel for each source: a power of two, and fewer for more ranks.
EP_HD constexpr int channel_slots(int ranks) {
  return ranks <= 2 ? kMostChannelSlots : ranks <= 4 ? 16 : ranks <= 8 ? 8 : 4;
}
EP_HD constexpr int64_t channel_slots_bytes(int ranks, int channels) {
  return channels * (ranks - 1) * channel_slots(ranks) * kChannelSlotBytes;
}

// The number of chunks that have landed in the slots, and the properties that must be equal on all ranks, in one store.
struct alignas(16) Landed {
  uint64_t chunks;
  uint64_t what;  // see sum_word
};
// Bytes of a shard, element of the sum, and the low bits of the operation's epoch.
EP_HD constexpr uint64_t sum_word(int64_t bytes, int element, uint64_t epoch) {
  return static_cast<uint64_t>(bytes) << 16 | (epoch & 0xFF) << 8 | static_cast<uint64_t>(element);
}
EP_HD constexpr int64_t sum_bytes(uint64_t word) { return static_cast<int64_t>(word >> 16); }
EP_HD constexpr uint64_t sum_epoch(uint64_t word) { return word >> 8 & 0xFF; }
EP_HD constexpr int64_t sum_element(uint64_t word) { return static_cast<int64_t>(word & 0xFF); }

// The control block in device memory: one per rank, zero at birth, words that only grow. By CTA and peer; the values
// are epochs or numbers of chunks, which live here, so that a replayed graph moves on.
struct DeviceControl {
  alignas(128) Sign signs[kMostCtas][kMaxRanks];
  alignas(128) Landed landed[kMostChannels][kMaxRanks];   // in this rank's slots, by source
  alignas(128) uint64_t freed[kMostChannels][kMaxRanks];  // chunks of this rank's that a destination has read
  alignas(128) uint64_t chunks[kMostChannels];            // of operations that are over; this rank's own
  alignas(128) uint64_t epoch;                            // kernels' operations that are over; this rank's own
  uint64_t small;                                         // of these the ones of small shards
  uint64_t ctas_done;
};

EP_HD constexpr int64_t place_word(int block, int64_t offset) { return static_cast<int64_t>(block) << 48 | offset; }

// targets[r]: where this rank's shard goes at rank r of the node, in a block; this rank's own is 0 where the shard lies
// there already. landing: 0, or where rank 0's shard lands in this rank's staging block, the others' following in
// order; outputs[r] are then where they go from there.
struct AllGatherArgs {
  Comm comm;  // control: DeviceControl of each rank
  Address input;
  int64_t bytes;
  Address targets[kMaxRanks];
  Address landing;
  Address outputs[kMaxRanks];
  int64_t place;  // of rank 0's shard in the block
  int32_t block;
  int32_t num_ctas;  // the kernel's; else 0: copy engines
  int32_t captured;  // copy engines: 1: kernels shake hands, since a graph would keep the values of stream operations
  int32_t reserved;
  uint64_t number;                  // of the operation; copy engines outside of a graph
  Address stream_words[kMaxRanks];  // StreamWords of each rank, as this device maps them
  Address begun;     // u64 in host memory: the number of the latest operation that the stream has come to, ...
  Address finished;  // ... and of the latest that is over
  Address stream;
};

// As CpuReduceScatterArgs, of shards of any size. slots[r]: of rank r, [num_ctas or more][num_ranks - 1 (the other
// sources)][channel_slots].
struct ReduceScatterArgs {
  Comm comm;  // control: DeviceControl of each rank
  Address inputs[kMaxRanks];
  Address slots[kMaxRanks];
  Address output;
  int64_t bytes;  // of a shard
  double scale;
  int32_t element;
  int32_t num_ctas;
  Address stream;
};

// 12 bytes of a small shard and the flag that says that they have arrived, in one store. With another flag, the word is
// an older operation's, or zero.
constexpr int kWordUnits = 3;
struct alignas(16) FlaggedWord {
  uint32_t units[kWordUnits];
  uint32_t flag;  // see small_flag
};
constexpr int64_t kUnitBytes = sizeof(uint32_t);
constexpr int64_t kSmallBytes = 1 << 20;  // of all ranks' shards: what two operations may have under way
constexpr int kWordsAbreast = 32;         // their first units follow each other, then their second ones, and so on
EP_HD constexpr int64_t units_of(int64_t bytes) { return (bytes + kUnitBytes - 1) / kUnitBytes; }
EP_HD constexpr int64_t words_of(int64_t bytes) {
  const int64_t abreast = kWordsAbreast * kWordUnits, rest = units_of(bytes) % abreast;
  return units_of(bytes) / abreast * kWordsAbreast + (rest < kWordsAbreast ? rest : kWordsAbreast);
}
EP_HD constexpr int64_t first_unit_of(int64_t word) {
  return word / kWordsAbreast * kWordsAbreast * kWordUnits + word % kWordsAbreast;
}
EP_HD constexpr int64_t small_capacity(int ranks) { return words_of(kSmallBytes / ranks); }  // words of one shard
EP_HD constexpr int64_t small_words_bytes(int ranks) {
  return 2 * ranks * small_capacity(ranks) * static_cast<int64_t>(sizeof(FlaggedWord));
}
// From the low bits up: what must be alike on all ranks, the bytes of a shard less one and the element of a sum (-1: a
// gather) and one; then the low bits of the operation's number among the small ones, which come round again.
constexpr int kElementShift = 19, kNumberShift = 21, kNumberBits = 32 - kNumberShift;
EP_HD constexpr uint32_t small_flag(uint64_t number, int64_t bytes, int element) {
  return static_cast<uint32_t>(number) << kNumberShift | static_cast<uint32_t>(element + 1) << kElementShift |
         static_cast<uint32_t>(bytes - 1);
}
EP_HD constexpr bool is_of_number(uint32_t flag, uint64_t number) {
  return flag >> kNumberShift == (number & ((1u << kNumberBits) - 1));
}
EP_HD constexpr int64_t small_bytes(uint32_t flag) { return (flag & ((1u << kElementShift) - 1)) + 1; }
EP_HD constexpr int64_t small_element(uint32_t flag) {
  return static_cast<int64_t>(flag >> kElementShift & ((1u << (kNumberShift - kElementShift)) - 1)) - 1;
}
// So no word may keep a flag until that number comes again: an operation expires so many of the words that it does not
// use, in turn, and with the next kExpiries of its parity, in half that time, all have had theirs.
constexpr int kExpiries = 1 << (kNumberBits - 2);
EP_HD constexpr int64_t expired_at_once(int ranks) { return (small_capacity(ranks) + kExpiries - 1) / kExpiries; }

// Gathers, or sums, shards of a few bytes. words[r]: FlaggedWord [2][num_ranks][capacity] of each rank, by the number's
// parity and the shard's source. inputs[r]: this rank's shard for rank r; to gather, the same for all.
struct SmallArgs {
  Comm comm;
  Address words[kMaxRanks];
  Address inputs[kMaxRanks];
  Address outputs[kMaxRanks];  // where each rank's shard goes; this rank's own lies there, or is where the sum goes
  int64_t bytes;               // of a shard
  double scale;                // of the sum
  int32_t element;             // of the sum, -1: gather
  int32_t num_ctas;            // as many for each peer
  Address stream;
};

#if defined(EP_WITH_CUDA)
namespace cuda {
void all_gather(const AllGatherArgs& args);
void reduce_scatter(const ReduceScatterArgs& args);
void small(const SmallArgs& args);
}  // namespace cuda
#endif

namespace cpu {
void all_gather(const CpuAllGatherArgs& args);
void reduce_scatter(const CpuReduceScatterArgs& args);
}  // namespace cpu

}  // namespace ep
