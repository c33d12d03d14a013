// The layout of all memory: the shared blocks, the routing that a handle owns, and the rows in a pool.
//
// Every offset and size is computed here and nowhere else, for host and device, so a layout bug shows in CPU tests.
// Shapes: R ranks, T tokens of one rank, K experts per token, E experts, E_l = E / R, C = kMaxChunks.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define EP_HD __host__ __device__ __forceinline__
#else
#define EP_HD inline
#endif

namespace ep {

constexpr int kMaxRanks = 16;
constexpr int kMaxTopk = 128;
constexpr int kMaxChunks = 40;
constexpr int kShortChunks = 4;      // the last ones: the last rows should be signalled soon
constexpr int kUnitTokens = 32;      // chunks and blocks are whole units
constexpr int64_t kRowAlign = 16;    // a row and its parts start here, so that bulk copies apply
constexpr int64_t kSlotAlign = 128;  // a slot starts on its own cache line

EP_HD constexpr int64_t align_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
EP_HD constexpr int64_t ceil_div(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// A chunk is a fixed block of source tokens: a function of T alone, never of the number of SMs. The last kShortChunks
// are a unit each, those before them equally many units.
struct Chunks {
  int num_tokens;
  int count;
  int long_units;  // of each long chunk
  int long_end;    // units in long chunks
  int num_long;

  EP_HD constexpr int begin(int chunk) const {
    return (chunk < num_long ? chunk * long_units : long_end + chunk - num_long) * kUnitTokens;
  }
  EP_HD constexpr int end(int chunk) const { return chunk + 1 < count ? begin(chunk + 1) : num_tokens; }
  EP_HD constexpr int of(int token) const {
    const int unit = token / kUnitTokens;
    return unit < long_end ? unit / long_units : num_long + unit - long_end;
  }
};
EP_HD constexpr Chunks chunks_of(int num_tokens) {
  const int units = static_cast<int>(ceil_div(num_tokens, kUnitTokens));
  const int last = units < kShortChunks ? units : kShortChunks, rest = units - last;
  const int per_chunk = rest == 0 ? 1 : static_cast<int>(ceil_div(rest, kMaxChunks - kShortChunks));
  const int num_long = (rest + per_chunk - 1) / per_chunk;  // in 32 bits, because kernels compute it
  return Chunks{num_tokens, num_long + last, per_chunk, rest, num_long};
}
EP_HD constexpr int num_chunks(int num_tokens) { return chunks_of(num_tokens).count; }

constexpr int64_t kMostTokens = INT32_MAX / kMaxRanks;  // of a rank: sums over ranks fit in 32 bits
constexpr int64_t kMostRowBytes = int64_t{1} << 29;     // and of its scales: kernels count a slot's bytes in 32 bits
constexpr int64_t kMostKeys = 8'000;  // ranks and experts on CUDA: their counts lie in shared memory, in notify twice

// On CUDA plan counts tokens in blocks of whole units, few enough that each may add up what all others counted.
constexpr int kMaxBlocks = 128;
EP_HD constexpr int block_tokens(int num_tokens) {
  return static_cast<int>(num_tokens == 0 ? kUnitTokens : align_up(ceil_div(num_tokens, kMaxBlocks), kUnitTokens));
}
EP_HD constexpr int plan_blocks(int num_tokens) {
  return static_cast<int>(num_tokens == 0 ? 1 : ceil_div(num_tokens, block_tokens(num_tokens)));
}
// A block's counts: int32 tokens for each rank, then pairs for each expert.
EP_HD constexpr int64_t plan_block_words(int R, int E) { return align_up(static_cast<int64_t>(R) + E, 4); }

// ---------------------------------------------------------------------------------------------------------------
// The properties of one operation that must be equal on all ranks, and T, which may differ. The sender writes it. The
// receiver checks it before it reads a row.
struct Header {
  int64_t op;            // enum Op
  int64_t row_bytes;     // payload of one row
  int64_t scale_bytes;   // scales of one row, 0 without
  int64_t weight_bytes;  // 4 or 8 for each weight that travels, 0 without
  int64_t topk;
  int64_t dtype;  // the caller's own code of the element type
  int64_t layout;
  int64_t config_hash;
  int64_t num_tokens;  // T of the token owner; not compared
};
constexpr int kHeaderFields = 9;
constexpr int kComparedFields = 8;
static_assert(sizeof(Header) == kHeaderFields * 8, "Header is a plain list of words");

enum Op : int64_t { kOpDispatch = 1, kOpCachedDispatch = 2, kOpCombine = 3 };
enum Layout : int32_t { kFlat = 0, kTokenMajor = 1 };
enum Pool : int32_t { kDispatchPool = 0, kCombinePool = 1 };
enum Step : int32_t {
  kNoStep = 0,
  kPlan = 1,
  kNotify = 2,
  kDispatchSend = 3,
  kDispatchRecv = 4,
  kCombineSend = 5,
  kCombineRecv = 6,
  kAllGather = 7,
  kReduceScatter = 8
};

// ---------------------------------------------------------------------------------------------------------------
// The control block: peer-mapped, one per rank, zero at birth, written by peers, never reset.
struct alignas(16) Arrival {  // of one chunk of one source; on CUDA stored in one piece
  uint64_t flag;              // epoch; otherwise stored last, with release
  int32_t begin;              // the chunk's rows are [begin, end) of the source's rows here
  int32_t end;
};
struct Opening {  // of one source, signalled before its first row
  uint64_t flag;
  Header header;
  int64_t pad[6];
};
static_assert(sizeof(Opening) == 128 && sizeof(Arrival) == 16, "peers write these whole");

// A count row is 64-bit words: the halves of a Header, lower ones first, then num_rows_for_rank[R], and, for each
// expert of the rank that it goes to, num_rows_for_expert[E_l]. The higher half of each word is the lower half of the
// epoch. So a word needs no flag beside it: a reader waits for the words themselves.
constexpr int kHeaderWords = 2 * kHeaderFields;
EP_HD constexpr int count_row_words(int R, int E) { return kHeaderWords + R + E / R; }
EP_HD constexpr uint64_t tagged(uint64_t epoch, uint32_t value) { return epoch << 32 | value; }
EP_HD constexpr bool has_tag(uint64_t word, uint64_t epoch) { return ((word >> 32 ^ epoch) & UINT32_MAX) == 0; }
EP_HD constexpr int64_t count_row_bytes(int R, int E) {
  return align_up(8 * static_cast<int64_t>(count_row_words(R, E)), 128);
}

struct ControlLayout {
  int64_t consumed;    // u64 [3][R]: epoch up to which peer r has read what this rank wrote to it
  int64_t opening;     // Opening [2 pools][R sources]
  int64_t arrival;     // Arrival [2 pools][R sources][C]
  int64_t count_rows;  // [2][R] count rows, double-buffered by epoch parity
  int64_t bytes;
};
constexpr int kConsumedCounts = 2;  // index of the count rows beside the two pools

EP_HD constexpr ControlLayout control_layout(int R, int E) {
  ControlLayout at{};
  at.consumed = 0;
  at.opening = at.consumed + align_up(3 * 8 * R, 128);
  at.arrival = at.opening + static_cast<int64_t>(sizeof(Opening)) * 2 * R;
  at.count_rows = at.arrival + static_cast<int64_t>(sizeof(Arrival)) * 2 * R * kMaxChunks;
  at.bytes = at.count_rows + 2 * R * count_row_bytes(R, E);
  return at;
}

// ---------------------------------------------------------------------------------------------------------------
// Local to a rank, in its device's memory: epochs, and the counters of finished CTAs.
struct State {
  uint64_t epoch[6];  // finished operations, indexed by Step - 1 (kPlan unused)
  uint64_t fault;     // nonzero: every later kernel leaves at once
  uint64_t ctas_done[6];
  uint64_t started[2];       // by Pool: epoch of the latest sender whose CTAs all run or have exited
  uint64_t ctas_started[2];  // by Pool
  uint64_t placed;           // CUDA: epoch of the latest send that may read where notify has placed its rows
  uint64_t ctas_placed;
  uint64_t laid_out;     // CUDA: epoch of the latest dispatch for which notify has the counts of all peers
  uint64_t abort_look;   // when the next look at the board's abort word is due: one thread of the device takes it
  uint32_t next_row[3];  // by Queue: how often warps asked for a row beyond those that are their own
  uint32_t chunk_done[2][kMaxChunks];  // by Pool: CTAs whose rows of the chunk are written
};

// ---------------------------------------------------------------------------------------------------------------
// The board: host memory that every process of the group maps (and the device, too). One per rank; peers write
// only `abort`. It outlives any kernel and any peer.
enum FaultCode : int32_t {
  kNoFault = 0,
  kTimeout = 1,
  kAborted = 2,
  kDisagree = 3,
  kBadIds = 4,
  kBadData = 5,
  kTooSmall = 6
};

struct Fault {
  int32_t code;
  int32_t step;
  int32_t peer;
  int32_t field;  // of the Header, for kDisagree; otherwise detail
  int64_t expected;
  int64_t seen;
};
constexpr int kTotals = 4;
enum Total : int32_t { kTotalSlots = 0, kTotalRows = 1, kTotalMaxRows = 2, kTotalMaxSent = 3 };

struct Board {
  uint32_t abort;         // rank + 1 of the one that aborted; stored after the reason
  uint32_t abort_claim;   // rank + 1 of the one that may write the reason
  uint32_t fault_set;     // stored after `fault`
  Fault fault;            // the first fault seen on this rank
  uint64_t ticket;        // stored after the totals: which notify they belong to
  uint32_t gate_reached;  // test gates: the step that is held, and the word that releases it
  uint32_t gate_open;
  uint64_t reserved_pools;  // how often this rank has found, or made, a pool large enough for an operation
  char reason[384];         // of the abort
  char activity[128];       // what this rank's host is doing, for others' error messages
};
// The totals follow the struct: int64 [kTotals], then the rows received for each local expert [E_l].
EP_HD constexpr int64_t board_bytes(int local_experts) {
  return static_cast<int64_t>(sizeof(Board)) + 8 * (kTotals + static_cast<int64_t>(local_experts));
}

// ---------------------------------------------------------------------------------------------------------------
// Routing metadata of one dispatch, int32 words, owned by the handle.
struct MetaLayout {
  int64_t rank_count;      // [R]     my tokens for each rank
  int64_t expert_count;    // [E]     my pairs for each expert
  int64_t send_base;       // [R]     where rank d's partial rows start in my combine pool
  int64_t combine_base;    // [R]     where my partial rows start in rank s's combine pool
  int64_t recv_offset;     // [R+1]   the slots that I receive, numbered by source
  int64_t src_tokens;      // [R]     T of each source
  int64_t flat_base;       // [R][E_l] first FLAT row of each source's pairs for each local expert
  int64_t expert_offset;   // [E_l+1] FLAT rows by local expert, aligned
  int64_t expert_rows;     // [E_l]   rows received for each local expert
  int64_t send_chunk_end;  // [R][C]  my rows for rank d up to the end of chunk c
  int64_t recv_chunk_end;  // [R][C]  source s's rows here up to the end of its chunk c
  int64_t max_rows;        // [1]     the most rows that any rank sends to any
  int64_t words;
};
EP_HD constexpr MetaLayout meta_layout(int R, int E) {
  MetaLayout at{};
  at.rank_count = 0;
  at.expert_count = at.rank_count + R;
  at.send_base = at.expert_count + E;
  at.combine_base = at.send_base + R;
  at.recv_offset = at.combine_base + R;
  at.src_tokens = at.recv_offset + R + 1;
  at.flat_base = at.src_tokens + R;
  at.expert_offset = at.flat_base + E;
  at.expert_rows = at.expert_offset + E / R + 1;
  at.send_chunk_end = at.expert_rows + E / R;
  at.recv_chunk_end = at.send_chunk_end + static_cast<int64_t>(R) * kMaxChunks;
  at.max_rows = at.recv_chunk_end + static_cast<int64_t>(R) * kMaxChunks;
  at.words = at.max_rows + 1;
  return at;
}

// ---------------------------------------------------------------------------------------------------------------
// The dispatch pool is R regions of equally many slots, one for each source: so a source knows where its rows go
// before it knows what others send. Slots that are received are numbered without the gaps, see recv_offset.
// Slots are numbered by int32.
EP_HD constexpr int32_t region_slots(int64_t pool_bytes, int64_t slot_bytes, int R) {
  const int64_t slots = pool_bytes / slot_bytes;
  return static_cast<int32_t>((slots < INT32_MAX ? slots : INT32_MAX) / R);
}

// A slot of the dispatch pool: its head, which is ids[K], positions[K], weights[K] and the scales, then the row. The
// head ends where the row begins, on a cache line. The same bytes go to every rank that a token goes to; each takes the
// pairs whose experts it holds.
struct SlotLayout {
  int64_t ids;        // int32 [K], -1: dropped; where what travels begins
  int64_t positions;  // int32 [K]: of the pair among its source's for the expert
  int64_t weights;    // f32 or f64 [K]; absent when weight_bytes is 0
  int64_t scales;
  int64_t row;    // where the head ends
  int64_t image;  // where what travels ends
  int64_t bytes;
};
EP_HD constexpr SlotLayout slot_layout(int64_t row_bytes, int64_t scale_bytes, int64_t weight_bytes, int64_t K) {
  const int64_t ids = align_up(4 * K, kRowAlign), weights = align_up(weight_bytes * K, kRowAlign);
  const int64_t head = 2 * ids + weights + align_up(scale_bytes, kRowAlign);
  SlotLayout at{};
  at.row = align_up(head, kSlotAlign);
  at.ids = at.row - head;
  at.positions = at.ids + ids;
  at.weights = at.positions + ids;
  at.scales = at.weights + weights;
  at.image = align_up(at.row + row_bytes, kRowAlign);
  at.bytes = align_up(at.image, kSlotAlign);
  return at;
}

// A slot of the combine pool: the partial row, then the values that ride back per pair: extra[K].
struct PartialLayout {
  int64_t extra;  // f32 or f64 [K]; absent when weight_bytes is 0
  int64_t bytes;
};
EP_HD constexpr PartialLayout partial_layout(int64_t row_bytes, int64_t weight_bytes, int64_t K) {
  PartialLayout at{};
  at.extra = align_up(row_bytes, kRowAlign);
  at.bytes = align_up(at.extra + weight_bytes * K, kSlotAlign);
  return at;
}

}  // namespace ep
