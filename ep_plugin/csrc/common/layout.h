// The layout of all memory that dispatch and combine use. Every offset and size is computed here and nowhere else, for
// host and device, so a layout bug shows in CPU tests.
//
//   control block  peer memory, one per rank: counts, flags and consumed words, which peers write
//   pools          peer memory, two per rank: slots for the rows of dispatch and for the partial rows of combine
//   state          memory of the rank's device: epochs, and counters of CTAs
//   board          host memory that all ranks of the node map, one per rank: its first fault, an abort, totals
//   meta           the routing of one dispatch, in a tensor that the handle owns
//
// Shapes: R ranks, T tokens of one rank, K experts per token, E experts, E_l = E / R, C = kMaxChunks. O origins: a rank
// dispatches tokens of one node or of several, one node's tokens after the other's. O = 1 unless the group spans nodes.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define EP_HD __host__ __device__ __forceinline__
#define EP_NOINLINE __noinline__
#else
#define EP_HD inline
#define EP_NOINLINE
#endif

namespace ep {

constexpr int kMaxRanks = 72;
constexpr int kRankWords = (kMaxRanks + 31) / 32;  // 32-bit words with a bit for each rank
constexpr int kMaxTopk = 128;
constexpr int kMaxChunks = 40;
constexpr int kShortChunks = 4;      // chunks at the end, so that the last rows are signalled soon
constexpr int kUnitTokens = 32;      // chunks, and the blocks of plan, are multiples of this
constexpr int64_t kRowAlign = 16;    // a row and its parts, because bulk copies need it
constexpr int64_t kSlotAlign = 128;  // a slot starts on its own cache line

EP_HD constexpr int64_t align_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
EP_HD constexpr int64_t ceil_div(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// The chunks of T source tokens. They depend on T alone, never on the number of SMs. Each of the last kShortChunks
// chunks is one unit of kUnitTokens tokens. Each chunk before them is `long_units` units, except that the last of these
// long chunks may be shorter.
struct Chunks {
  int num_tokens;
  int count;
  int long_units;  // units of each long chunk
  int long_end;    // units of all long chunks
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

constexpr int64_t kMaxTokens = INT32_MAX / kMaxRanks;  // tokens of one rank; sums over ranks fit in 32 bits
constexpr int64_t kMaxRowBytes = int64_t{1} << 29;     // also for scales: kernels count a slot's bytes in 32 bits
constexpr int64_t kMaxKeys = 8'000;  // ranks + experts on CUDA: notify has their counts twice in shared memory

// On CUDA, plan counts tokens in blocks of whole units. There are few blocks, because notify sums, for each block, the
// counts of all blocks before it.
constexpr int kMaxBlocks = 128;
EP_HD constexpr int block_tokens(int num_tokens) {
  return static_cast<int>(num_tokens == 0 ? kUnitTokens : align_up(ceil_div(num_tokens, kMaxBlocks), kUnitTokens));
}
EP_HD constexpr int plan_blocks(int num_tokens) {
  return static_cast<int>(num_tokens == 0 ? 1 : ceil_div(num_tokens, block_tokens(num_tokens)));
}
// The counts of a block, int32: tokens for each rank, then pairs for each expert.
EP_HD constexpr int64_t plan_block_words(int R, int E) { return align_up(static_cast<int64_t>(R) + E, 4); }

// ---------------------------------------------------------------------------------------------------------------
// The properties of one operation that must be equal on all ranks, and T, which may differ. The sender writes the
// header, and the receiver checks it before it reads a row.
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

// A dispatch with a capacity is an operation of its own over several nodes, where messages then have another size.
enum Op : int64_t { kOpDispatch = 1, kOpCachedDispatch = 2, kOpCombine = 3, kOpDispatchWithCapacity = 4 };
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
  kPack = 7,
  kCombineAdd = 8,
  kAllGather = 9,
  kReduceScatter = 10,
  kLlDispatchSend = 11,
  kLlDispatchRecv = 12,
  kLlCombineSend = 13,
  kLlCombineRecv = 14,
  kSend = 15,
  kReceive = 16
};
constexpr int kStateSteps = kCombineAdd;  // the steps that use State; others have words of their own

// What a dispatch with a capacity leaves out of its rows for other nodes, in messages, in count rows and in meta.
enum RailOverflow : int32_t {
  kLeftOut = 0,   // rows that were left out
  kMostRows = 1,  // the rows of a rank for a node that there must be room for, so that none is left out
};
constexpr int kRailOverflowWords = 2;

// ---------------------------------------------------------------------------------------------------------------
// The control block: one per rank, written by peers. It starts as zeros and is never reset.

// The arrival of one chunk of one source. On CUDA it is one 16-byte store.
struct alignas(16) Arrival {
  uint64_t flag;  // epoch; on CPUs stored last, with release order
  int32_t begin;  // the chunk's rows are [begin, end) of the source's rows here
  int32_t end;
};
// A source's header, signalled before its first row.
struct Opening {
  uint64_t flag;
  Header header;
  int64_t pad[6];
};
static_assert(sizeof(Opening) == 128 && sizeof(Arrival) == 16, "peers write these whole");

// A count row is 64-bit words: the halves of a Header, lower ones first, then num_rows_for_rank[R], and, for each
// expert of the rank that it goes to, num_rows_for_expert[E_l]. If the tokens come from other nodes, what was left out
// on the way follows, as far as this rank knows (MessageLayout), and the part of each origin in these counts: the rows
// for the rank that the count row goes to, then num_rows_for_expert[E_l]. O = 0: they are this rank's own. The
// higher half of each word is the lower half of the epoch. So a word needs no flag beside it: a reader waits for the
// words themselves.
constexpr int kHeaderWords = 2 * kHeaderFields;
EP_HD constexpr int count_row_words(int R, int E, int O) {
  return kHeaderWords + R + E / R + (O > 0 ? kRailOverflowWords + O * (1 + E / R) : 0);
}
EP_HD constexpr uint64_t tagged(uint64_t epoch, uint32_t value) { return epoch << 32 | value; }
EP_HD constexpr bool has_tag(uint64_t word, uint64_t epoch) { return ((word >> 32 ^ epoch) & UINT32_MAX) == 0; }
EP_HD constexpr int64_t count_row_bytes(int R, int E, int O) {
  return align_up(8 * static_cast<int64_t>(count_row_words(R, E, O)), 128);
}

// The message of a dispatch to the rank with the same number on another node, int64: the Header; what the sender has
// left out of its rows for all nodes; how long it waited for messages in its dispatch before; for each of the C chunks
// the tokens for the node; then for each chunk the tokens for each of the node's R ranks and the pairs for each of its
// E experts. Tokens that were left out for the node are only in the tokens of each chunk. Rows are left out where a
// dispatch with a capacity has less room for a node than its tokens need.
struct MessageLayout {
  int num_chunks, keys;
  EP_HD constexpr MessageLayout(int C, int R, int E) : num_chunks(C), keys(R + E) {}
  EP_HD constexpr int64_t rail_overflow() const { return kHeaderFields; }
  EP_HD constexpr int64_t waited() const { return kHeaderFields + kRailOverflowWords; }
  EP_HD constexpr int64_t tokens(int chunk) const { return waited() + 1 + chunk; }
  EP_HD constexpr int64_t parts(int chunk) const { return tokens(num_chunks) + int64_t{chunk} * keys; }
  EP_HD constexpr int64_t words() const { return parts(num_chunks); }
};

// The words of Nodes::waits, in nanoseconds: when layout wrote the messages of a dispatch; how long after that plan
// ran; and how long this rank has waited for each node. The ranks of a rail wait for the one that comes last. It waits
// the shortest, and place counts what this rank has waited longer. So each dispatch shows who was late in the one
// before.
enum NodeWaits : int32_t { kMessagesWritten = 0, kWaited = 1, kWaitedFor = 2 };

struct ControlLayout {
  int64_t consumed;    // u64 [3][R]: epoch up to which peer r has read what this rank wrote to it
  int64_t opening;     // Opening [2 pools][R sources]
  int64_t arrival;     // Arrival [2 pools][R sources][C]
  int64_t count_rows;  // [2][R] count rows, double-buffered by epoch parity
  int64_t bytes;
};
constexpr int kConsumedCounts = 2;  // index of the count rows beside the two pools

EP_HD constexpr ControlLayout control_layout(int R, int E, int O) {
  ControlLayout at{};
  at.consumed = 0;
  at.opening = at.consumed + align_up(3 * 8 * R, 128);
  at.arrival = at.opening + static_cast<int64_t>(sizeof(Opening)) * 2 * R;
  at.count_rows = at.arrival + static_cast<int64_t>(sizeof(Arrival)) * 2 * R * kMaxChunks;
  at.bytes = at.count_rows + 2 * R * count_row_bytes(R, E, O);
  return at;
}

// ---------------------------------------------------------------------------------------------------------------
// The state: in the memory of the rank's device, written by this rank's kernels alone.
struct State {
  uint64_t epoch[kStateSteps];      // finished operations, by Step - 1; unused for steps that meet no peer
  uint64_t fault;                   // nonzero: every later kernel exits at once
  uint64_t ctas_done[kStateSteps];  // by Step - 1: CTAs of the running kernel that have finished
  uint64_t positions_ready;         // CUDA: epoch of the latest dispatch send whose positions notify has computed
  uint64_t ctas_positioned;         // CUDA: CTAs of the running notify that have computed their positions
  uint64_t counts_ready;            // CUDA: epoch of the latest dispatch for which notify has the counts of all peers
  uint64_t next_abort_check;        // time from which one thread of the device may read the board's abort word again
  uint32_t next_row[3];  // by Queue (cuda/moe/rows.cuh): rows that warps have requested after their first one
  uint32_t chunk_done[2][kMaxChunks];  // by Pool: CTAs whose rows of the chunk are written
  // Time that this rank's kernels have waited for each rank of the node. CUDA: only for its counts and openings.
  uint64_t waited_ns[kMaxRanks];
};

// ---------------------------------------------------------------------------------------------------------------
// The board: one per rank, in host memory that every process of the node and the rank's device map. Peers write only
// the abort. The board outlives kernels and peers.
enum FaultCode : int32_t {
  kNoFault = 0,
  kTimeout = 1,
  kAborted = 2,
  kDisagree = 3,
  kBadIds = 4,
  kBadData = 5,
  kTooSmall = 6,
  kBadHandle = 7,
  kMasked = 8,  // low latency: a peer has masked this rank
  kBadCounts = 9
};

struct Fault {
  int32_t code;
  int32_t step;
  int32_t peer;
  int32_t field;  // kDisagree: index of the Header's field; otherwise a detail, such as the chunk
  int64_t expected;
  int64_t seen;
};
constexpr int kTotals = 4;
enum Total : int32_t { kTotalSlots = 0, kTotalRows = 1, kTotalMaxRows = 2, kTotalMaxSent = 3 };

struct Board {
  uint32_t abort;         // rank + 1 of the rank that aborted; stored after the reason
  uint32_t abort_claim;   // rank + 1 of the rank that may write the reason
  uint32_t fault_set;     // stored after `fault`
  Fault fault;            // the first fault seen on this rank
  uint64_t ticket;        // stored after the totals: the notify that they belong to
  uint32_t gate_reached;  // test gates: the step that stands at its gate, and the word that opens it
  uint32_t gate_open;
  uint64_t reserved_pools;  // how often this rank has found or made pools large enough for an operation
  char reason[384];         // the reason of the abort
  char activity[128];       // the activity of this rank's host, for the error messages of others
};
// The totals of each segment follow the struct: int64 [kTotals], then the rows received for each local expert [E_l].
constexpr int64_t board_bytes(int64_t num_totals) { return static_cast<int64_t>(sizeof(Board)) + 8 * num_totals; }

// ---------------------------------------------------------------------------------------------------------------
// Routing metadata of one dispatch, int32 words, owned by the handle.
//
// token_base, token_rows, flat_base, expert_offset and expert_rows place received rows in the output. Several
// dispatches can fill one output: between notify and receive, the caller rewrites these words of each to their places
// in that output. A base plus a position among all rows or pairs of the source is a row, whichever origin the position
// is in.
struct MetaLayout {
  int64_t rank_prefix;     // [R][R]  rows from ranks up to the first index for the second: DeepEP's rank_prefix_matrix
  int64_t rank_count;      // [R]     tokens of this rank for each rank
  int64_t expert_count;    // [E]     pairs of this rank for each expert
  int64_t send_base;       // [R]     first slot of rank d's partial rows in this rank's combine pool
  int64_t combine_base;    // [R]     first slot of this rank's partial rows in rank s's combine pool
  int64_t recv_offset;     // [R+1]   received slots, numbered by source: source s has [s] to [s+1]
  int64_t src_tokens;      // [R]     T of each source
  int64_t token_base;      // [R][O]  TOKEN_MAJOR row of a source's slot, minus the slot's number
  int64_t token_rows;      // [1]     TOKEN_MAJOR rows in all
  int64_t flat_base;       // [R][O][E_l] FLAT row of a source's pair for each local expert, minus the pair's position
  int64_t expert_offset;   // [E_l+1] FLAT rows by local expert, aligned
  int64_t expert_rows;     // [E_l]   rows received for each local expert
  int64_t origin_end;      // [R][O]  slots of each source up to the end of an origin
  int64_t origin_rows;     // [R][O][E_l] rows received from each source and origin for each local expert
  int64_t send_chunk_end;  // [R][C]  rows of this rank for rank d up to the end of chunk c
  int64_t recv_chunk_end;  // [R][C]  rows received from source s up to the end of its chunk c
  int64_t max_rows;        // [1]     the most rows that any rank sends to any
  int64_t rail_overflow;   // [2]     what all ranks of all nodes together have left out, enum RailOverflow
  int64_t words;
};
EP_HD constexpr MetaLayout meta_layout(int R, int E, int O) {
  MetaLayout at{};
  at.rank_prefix = 0;
  at.rank_count = at.rank_prefix + static_cast<int64_t>(R) * R;
  at.expert_count = at.rank_count + R;
  at.send_base = at.expert_count + E;
  at.combine_base = at.send_base + R;
  at.recv_offset = at.combine_base + R;
  at.src_tokens = at.recv_offset + R + 1;
  at.token_base = at.src_tokens + R;
  at.token_rows = at.token_base + static_cast<int64_t>(R) * O;
  at.flat_base = at.token_rows + 1;
  at.expert_offset = at.flat_base + static_cast<int64_t>(E) * O;
  at.expert_rows = at.expert_offset + E / R + 1;
  at.origin_end = at.expert_rows + E / R;
  at.origin_rows = at.origin_end + static_cast<int64_t>(R) * O;
  at.send_chunk_end = at.origin_rows + static_cast<int64_t>(E) * O;
  at.recv_chunk_end = at.send_chunk_end + static_cast<int64_t>(R) * kMaxChunks;
  at.max_rows = at.recv_chunk_end + static_cast<int64_t>(R) * kMaxChunks;
  at.rail_overflow = at.max_rows + 1;
  at.words = at.rail_overflow + kRailOverflowWords;
  return at;
}

// ---------------------------------------------------------------------------------------------------------------
// The dispatch pool has R regions of equally many slots, one for each source. So a source knows the slots of its rows
// before it knows what others send. MetaLayout::recv_offset numbers received slots without the gaps between regions.
// Slot numbers are int32.
EP_HD constexpr int32_t region_slots(int64_t pool_bytes, int64_t slot_bytes, int R) {
  const int64_t slots = pool_bytes / slot_bytes;
  return static_cast<int32_t>((slots < INT32_MAX ? slots : INT32_MAX) / R);
}

// A slot of the dispatch pool: [pad | ids[K] | positions[K] | weights[K] | scales | row]. Everything before the row is
// the head. The row starts on a cache line. All destinations of a token receive the same bytes; each uses the pairs
// whose experts it holds. The sender writes the bytes from `ids` to `image`.
struct SlotLayout {
  int64_t ids;        // int32 [K], -1: dropped
  int64_t positions;  // int32 [K]: position of the pair among its source's pairs for the expert
  int64_t weights;    // f32 or f64 [K]; absent when weight_bytes is 0
  int64_t scales;
  int64_t row;    // end of the head
  int64_t image;  // end of the row, aligned
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

// A slot of the combine pool: [partial row | extra[K]]. The token's owner adds up the extra values of all ranks.
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
