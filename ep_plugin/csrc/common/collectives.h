// All-gather and reduce-scatter inside a node: the layout of what ranks share in memory, and the kernels' arguments.
// docs/collectives.md explains how they work.
//
//   CPU ranks     CollectiveControl, one per rank: shards move through its cells, or stay in blocks that peers map
//   hosts         Requests and CallRows: hosts agree on blocks, and compare what they call
//   GPU ranks     DeviceControl, one per rank: signals between CTAs, and counts of chunks. StreamWords: handshakes of
//                 copy engines. FlaggedWord: small shards
//
// Words of this file:
//   shard       the part that one rank gives to a gather, or receives from a sum
//   block       peer memory from which Python makes tensors, mapped by every rank of the node
//   chunk       the part of a shard that moves at a time. Chunks are counted over all operations of a communicator
//   cell        memory for one chunk on its way
//   place       a position in peer memory: a block and an offset in it (place_word)
#pragma once
#include <array>
#include <cstdint>

#include "common/api.h"
#include "common/board.h"

namespace ep {

constexpr int kCells = 8;  // chunks that a rank may be ahead of its peers
constexpr int64_t kCellBytes = 256 * 1024;
constexpr int kMaxPeerBlocks = 64;  // of a communicator, so that one 64-bit word has a bit for each
// A ring of requests must be longer than one host can be ahead of another. Each call ahead takes a block that the other
// host has released, so a host is at most kMaxPeerBlocks calls ahead.
constexpr int kRequests = 2 * kMaxPeerBlocks;

enum CollectiveOp : int64_t { kOpAllGather = 1, kOpReduceScatter = 2 };

// --- CPU ranks -------------------------------------------------------------------------------------------------------
// A piece is what one rank contributes: its shard to a gather, or one shard for each rank to a sum. A piece in a block
// is read where it lies. Any other piece is copied, chunk by chunk, through the cells of its rank's control block.

// Describes a rank's piece. It is posted with the first chunk. The first kPieceFields words must be equal on all ranks.
struct PieceHeader {
  int64_t op;
  int64_t bytes;              // bytes of one shard
  int64_t element;            // Element of a sum, 0 for a gather
  int64_t block;              // the block that has the piece, or -1: it goes through the cells
  int64_t offset[kMaxRanks];  // in the block: of the shard (gather), or of the shard for each rank (sum)
};
constexpr int kPieceFields = 3;

// The control block of a CPU rank. It starts as zeros; counters only grow.
struct CollectiveControl {
  alignas(128) uint64_t posted;  // chunks that this rank has made available
  struct alignas(64) Word {
    uint64_t value;
  };
  alignas(128) Word consumed[kMaxRanks];  // written by peer r: how many of this rank's chunks it has read
  alignas(128) uint64_t chunks;           // this rank's own: the chunks of all finished operations
  uint64_t operations;                    // this rank's own: finished operations
  // By the operation's number. A header is overwritten when no peer can still read it.
  alignas(128) PieceHeader headers[kCells];
  alignas(128) char cells[kCells][kCellBytes];
};

// Bytes of a shard in one chunk. A cell has one chunk of a gather, or one chunk for each rank of a sum.
EP_HD constexpr int64_t gather_chunk_bytes() { return kCellBytes; }
EP_HD constexpr int64_t scatter_chunk_bytes(int ranks) { return kCellBytes / ranks / 64 * 64; }

// A rank's piece, and the blocks in which peers' pieces may lie.
struct Piece {
  int64_t bytes;  // bytes of one shard
  int32_t block;  // the block that has the piece, or -1
  int32_t num_blocks;
  int64_t offset[kMaxRanks];  // as in PieceHeader
  Address blocks;             // u64 [num_blocks][kMaxRanks]: every rank's blocks as mapped here, 0: closed
  Address block_bytes;        // i64 [num_blocks]
};

// outputs[r]: where rank r's shard goes, in this rank's memory. outputs[comm.rank] may be the input itself.
struct CpuAllGatherArgs {
  Comm comm;
  Piece piece;
  Address input;
  Address outputs[kMaxRanks];
};

// output = scale * the sum of all ranks' shards for this rank, in float32 (float64 for float64) and in rank order.
// inputs[r]: this rank's shard for rank r. The output may be inputs[comm.rank].
struct CpuReduceScatterArgs {
  Comm comm;
  Piece piece;
  Address inputs[kMaxRanks];
  Address output;
  double scale;
  int32_t element;
  int32_t reserved;
};

// --- Hosts: requests for blocks --------------------------------------------------------------------------------------
// A ring of requests for each rank, in host memory that all ranks map. A peer that sees a request also sees all
// releases that came before it.
struct Request {
  uint64_t number;  // stored last
  int64_t bytes;    // requested size
  uint64_t free;    // a bit for each block to which nothing on this rank refers any more
  uint64_t reserved;
};

struct Requests {
  Request rows[kRequests];            // by number
  uint64_t released[kMaxPeerBlocks];  // by block: the number of its latest use that has ended
};

// Posts this rank's request `number`. uses: u64 [kMaxPeerBlocks], how often each block has been handed out. The caller
// makes sure that this rank releases no block meanwhile.
void post_request(Address requests, uint64_t number, int64_t bytes, Address uses);
// Records that the use number `uses` of a block has ended. A use may be recorded more than once.
void release_block(Address requests, int block, uint64_t uses);

// Sets `free`: whether a block that has been handed out `uses` times was free on a rank when that rank posted request
// `number`. Waits until the rank has released the block or posted that request.
WaitResult was_free(Address requests, int block, uint64_t uses, uint64_t number, Address board, int64_t timeout_ns,
                    bool* free);

// --- Hosts: calls that they enqueue on devices -----------------------------------------------------------------------
// A ring of calls for each rank, in host memory that all ranks map.
// Copy engines compare nothing. So hosts post their calls, and the host that posts a call second compares: none waits.
constexpr int kCallFields = 3;
using CallWords = std::array<int64_t, kCallFields>;  // bytes of a shard, element of a sum, place of the output
// More calls than a host can be ahead of another: when a stream waits for a peer, its host soon has to wait, too.
constexpr int kCalls = 1024;

struct CallRow {
  uint64_t number;  // stored last; 0 while the others change
  int64_t words[kCallFields];
};

struct CallDifference {
  int peer;
  int field;  // as in PieceHeader
  int64_t mine;
  int64_t theirs;
};

// Posts this rank's call `number`, and compares it with the same call of every peer that has posted it. True if one
// differs. rings: Address [num_ranks].
bool post_call(Address rings, int num_ranks, int rank, uint64_t number, const CallWords& words, CallDifference* found);

// --- GPU ranks: gathers ----------------------------------------------------------------------------------------------
// Ranks store their shards into their peers' outputs, which have the same place on all ranks. Shards for any other
// output go through the staging block. Its number follows the numbers of all other blocks.
constexpr int kStagingBlock = kMaxPeerBlocks;
constexpr int kMaxCtas = 128;

// The signal of a peer's CTA to the CTA of the same index on this rank (cuda/collectives/barrier.cuh). One store writes
// `ready` and `bytes`, after `place`.
struct alignas(16) CtaSignal {
  uint64_t ready;  // epoch for which this rank may write the peer's outputs
  int64_t bytes;   // bytes of a shard
  int64_t place;   // the output's place, see place_word
  uint64_t done;   // epoch for which the peer has written its part here
};

// The words of handshakes by stream memory operations, by block and peer. One per rank, in host memory, because there
// the host can end a wait even if all queues of the device are blocked by it. The host gives the values, which are
// numbers of operations. So a CUDA graph, which would repeat them, cannot use these words.
//   ready  the operation for which this rank may write the peer's block
//   done   the operation whose shard the peer has written here
struct StreamWords {
  uint64_t ready[kMaxPeerBlocks + 1][kMaxRanks];
  uint64_t done[kMaxPeerBlocks + 1][kMaxRanks];
};

// --- GPU ranks: sums -------------------------------------------------------------------------------------------------
// Shards move in chunks. The CTAs of one index on all ranks are a channel; it moves every num_ctas-th chunk. In each
// channel, each rank has cells for each source. Chunks are counted per channel, over all operations.
constexpr int kMaxChannels = 64;
constexpr int kMaxChannelCells = 32;
constexpr int64_t kSumRowBytes = 2048;  // of a row, which a warp sums at a time
constexpr int kMaxChunkRows = 8;
constexpr int64_t kChannelCellBytes = kMaxChunkRows * kSumRowBytes;
// Cells of a channel for each source: a power of two, fewer for more ranks.
EP_HD constexpr int channel_cells(int ranks) {
  return ranks <= 2 ? kMaxChannelCells : ranks <= 4 ? 16 : ranks <= 8 ? 8 : 4;
}
constexpr int kMaxSourceCells = 4 * kMaxRanks;  // of a channel, for all sources
static_assert(channel_cells(kMaxRanks) * kMaxRanks == kMaxSourceCells && kMaxSourceCells >= 64,
              "as the most ranks have");
EP_HD constexpr int64_t channel_cells_bytes(int ranks, int channels) {
  return channels * (ranks - 1) * channel_cells(ranks) * kChannelCellBytes;
}

// How many chunks of a source have arrived in a channel's cells, and what must be equal on all ranks. One store.
struct alignas(16) ArrivedChunks {
  uint64_t chunks;
  uint64_t properties;  // see sum_word
};
// The properties that must be equal, as one word: bytes of a shard, element of the sum, low bits of the operation's
// epoch.
EP_HD constexpr uint64_t sum_word(int64_t bytes, int element, uint64_t epoch) {
  return static_cast<uint64_t>(bytes) << 16 | (epoch & 0xFF) << 8 | static_cast<uint64_t>(element);
}
EP_HD constexpr int64_t sum_bytes(uint64_t word) { return static_cast<int64_t>(word >> 16); }
EP_HD constexpr uint64_t sum_epoch(uint64_t word) { return word >> 8 & 0xFF; }
EP_HD constexpr int64_t sum_element(uint64_t word) { return static_cast<int64_t>(word & 0xFF); }

// The control block of a GPU rank, in device memory that peers map. It starts as zeros; words only grow. Epochs and
// counts of chunks are kept here, so that a CUDA graph that is replayed advances them.
struct DeviceControl {
  alignas(128) CtaSignal cta_signals[kMaxCtas][kMaxRanks];
  alignas(128) ArrivedChunks arrived[kMaxChannels][kMaxRanks];  // by source: in this rank's cells
  alignas(128) uint64_t consumed[kMaxChannels][kMaxRanks];      // by destination: chunks of this rank that it has read
  alignas(128) uint64_t chunks[kMaxChannels];                   // this rank's own: chunks of finished operations
  alignas(128) uint64_t epoch;  // this rank's own: operations by kernels that have finished
  uint64_t small_operations;    // this rank's own: how many of them were small exchanges
  uint64_t ctas_done;
};

// A place as one word.
EP_HD constexpr int64_t place_word(int block, int64_t offset) { return static_cast<int64_t>(block) << 48 | offset; }

// This rank's shard goes to `offset` in the block of every other rank. staging: 0, or the address in this rank's
// staging block that receives rank 0's shard; the shards of the other ranks follow in order. outputs[r]: where rank r's
// shard goes in the end.
struct AllGatherArgs {
  Comm comm;  // control: DeviceControl of each rank
  Address input;
  int64_t bytes;
  Address blocks;       // table, as in Comm: each rank's block
  Address host_blocks;  // the same table in host memory
  int64_t offset;
  Address staging;
  Address outputs[kMaxRanks];
  int64_t place;  // the place of rank 0's shard in the output
  int32_t block;
  int32_t num_ctas;  // CTAs of the kernel; 0: copy engines
  int32_t captured;  // copy engines: 1 in a CUDA graph, where kernels do the handshake in place of stream operations
  int32_t reserved;
  uint64_t number;       // the operation's number, for copy engines outside of a graph
  Address stream_words;  // Address [R] in host memory: StreamWords of each rank, as this device maps them
  Address begun;         // u64 in host memory: number of the latest operation that the stream has begun
  Address finished;      // u64 in host memory: number of the latest operation that has finished
  Address stream;
};

// As CpuReduceScatterArgs. A rank's cells are [channels][num_ranks - 1 sources][channel_cells], with num_ctas channels
// or more.
struct ReduceScatterArgs {
  Comm comm;  // control: DeviceControl of each rank
  Address inputs[kMaxRanks];
  Address cells;      // table, as in Comm: each rank's cells
  Address own_cells;  // this rank's entry
  Address output;
  int64_t bytes;  // bytes of a shard
  double scale;
  int32_t element;
  int32_t num_ctas;
  Address stream;
};

// --- GPU ranks: small shards -----------------------------------------------------------------------------------------
// A unit is 4 bytes of a shard. A word is three units and a flag, in one store, so the flag shows that the units have
// arrived. A word with another flag is from an older operation, or still zero.
constexpr int kWordUnits = 3;
struct alignas(16) FlaggedWord {
  uint32_t units[kWordUnits];
  uint32_t flag;  // see small_flag
};
constexpr int64_t kUnitBytes = sizeof(uint32_t);
constexpr int64_t kSmallBytes = 1 << 20;  // most bytes of all ranks' shards together
// Units are numbered so that the first units of a group's words follow each other, then their second ones, and so on.
constexpr int kGroupWords = 32;
EP_HD constexpr int64_t units_of(int64_t bytes) { return (bytes + kUnitBytes - 1) / kUnitBytes; }
EP_HD constexpr int64_t words_of(int64_t bytes) {
  const int64_t group_units = kGroupWords * kWordUnits, rest = units_of(bytes) % group_units;
  return units_of(bytes) / group_units * kGroupWords + (rest < kGroupWords ? rest : kGroupWords);
}
EP_HD constexpr int64_t first_unit_of(int64_t word) {
  return word / kGroupWords * kGroupWords * kWordUnits + word % kGroupWords;
}
EP_HD constexpr int64_t small_capacity(int ranks) { return words_of(kSmallBytes / ranks); }  // words of one shard
EP_HD constexpr int64_t small_words_bytes(int ranks) {
  return 2 * ranks * small_capacity(ranks) * static_cast<int64_t>(sizeof(FlaggedWord));
}
// A flag, from the low bits up: the bytes of a shard minus 1, the element of the sum plus 1 (0: gather), and the low
// bits of the operation's number among the small ones. The first two must be equal on all ranks. The numbers repeat.
constexpr int kElementShift = 19, kNumberShift = 21, kNumberBits = 32 - kNumberShift;
EP_HD constexpr uint32_t small_flag(uint64_t number, int64_t bytes, int element) {
  return static_cast<uint32_t>(number) << kNumberShift | static_cast<uint32_t>(element + 1) << kElementShift |
         static_cast<uint32_t>(bytes - 1);
}
// Whether the flag is from an operation of this number.
EP_HD constexpr bool is_of_number(uint32_t flag, uint64_t number) {
  return flag >> kNumberShift == (number & ((1u << kNumberBits) - 1));
}
EP_HD constexpr int64_t small_bytes(uint32_t flag) { return (flag & ((1u << kElementShift) - 1)) + 1; }
EP_HD constexpr int64_t small_element(uint32_t flag) {
  return static_cast<int64_t>(flag >> kElementShift & ((1u << (kNumberShift - kElementShift)) - 1)) - 1;
}
// Numbers repeat, so no word may keep a flag until its number returns. Each operation expires some of the words that it
// does not use, in turn. kExpiries operations of one parity expire all words of that parity, in half the time in which
// numbers repeat.
constexpr int kExpiries = 1 << (kNumberBits - 2);
EP_HD constexpr int64_t expired_at_once(int ranks) { return (small_capacity(ranks) + kExpiries - 1) / kExpiries; }

// Gathers or sums small shards. A rank's words are FlaggedWord [2][num_ranks][small_capacity], by the parity of the
// operation's number and by source.
struct SmallExchangeArgs {
  Comm comm;
  Address words;              // table, as in Comm: each rank's words
  Address own_words;          // this rank's entry
  Address shards[kMaxRanks];  // gather: where each rank's shard goes. Sum: this rank's shard for each rank
  Address own;                // gather: this rank's shard. Sum: where the sum goes
  int64_t bytes;              // bytes of a shard
  double scale;               // the scale of the sum
  int32_t element;            // the element of the sum; -1: gather
  int32_t num_ctas;           // a multiple of the number of peers
  Address stream;
};

// The kernels of GPUs.
struct CollectiveKernels {
  void (*all_gather)(const AllGatherArgs&);
  void (*reduce_scatter)(const ReduceScatterArgs&);
  void (*small_exchange)(const SmallExchangeArgs&);
};

namespace cuda {  // only in builds with CUDA
void all_gather(const AllGatherArgs& args);
void reduce_scatter(const ReduceScatterArgs& args);
void small_exchange(const SmallExchangeArgs& args);
}  // namespace cuda

namespace cpu {
void all_gather(const CpuAllGatherArgs& args);
void reduce_scatter(const CpuReduceScatterArgs& args);
}  // namespace cpu

}  // namespace ep
