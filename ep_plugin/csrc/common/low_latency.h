// The layout of all memory of low-latency dispatch and combine, for host and device. common/low_latency_args.h has the
// arguments of the kernels and typed pointers.
//
//   block  peer memory, one per rank: words, flags, consumed words and slots, which peers write. It starts as zeros and
//          is never reset. All strides come from the communicator's maxima (LlShape), never from a call.
//   state  memory of the rank's device: epochs, masks, and counters of CTAs
//   plan   the routing of one dispatch, in a tensor that the handle owns
//
// Shapes: R ranks, T tokens of one rank, T_max most tokens of a rank in a call (header.max_tokens; at most the
// communicator's maximum), K experts per token, E experts, E_l = E / R on each rank. An expert's block in the output
// has R * T_max rows.
//
// Dispatch. The send half writes to every rank, itself included, in this order:
//   1. the header and all of this rank's expert ids, as words;
//   2. the row of each token that has an expert there, once, into the slot of that token;
//   3. for each group of tokens of which that rank got a row, a flag.
// The receive half waits for the words of every source, computes counts and places from them, and copies each slot to
// its rows as the flags come. Inside an expert, rows are ordered by (source rank, token).
// On CUDA a source sends at least ll_early_words() words of ids. Pairs that it does not have are -1. So a receiver
// waits for these words beside the header, which has T.
//
// Combine. The send half is first an owner of tokens. It writes the header and the weights of all its tokens to every
// peer, as words, since only the holders know which tokens they hold. Then it is a holder of experts. It waits for the
// header of every owner, and for the weights of each of the owner's tokens that it holds. It sums the token's rows in
// the order of k, in float32 (float64 for float64 rows), rounds once, and stores the partial row into the owner's slot
// [holder][token], then the flag of the group. The receive half adds the partial rows of each token in the order of the
// ranks, then the bias, and rounds once.
// Few pairs. An owner with at most kLlFewPairs pairs sends only the header. Its holders wait for nothing before they
// send it the row of each pair, as words. The receive half weights and adds the rows of each token in the order of k,
// then the bias, and rounds once. So all data crosses the links one way, and no row waits for words of its owner. With
// shrink no owner uses this path (ll_has_few_pairs).
//
// Memory order. A word carries its epoch, so it needs no flag. A flag is stored with release order at system scope
// after the rows of its group. When both halves of a rank have read everything of an operation that peers wrote, the
// epoch is stored in the consumed word of its parity at every peer, with release order. The receive half does it. On
// CUDA a kernel with both halves may leave it to the next send half of its kind, and then does not count its CTAs at
// the end (ll_counts_ctas in low_latency.cuh).
//
// Reuse. All words, flags and slots exist twice, and epochs alternate between the two parities. Before its first store
// to a peer, a send half waits until the peer's consumed word of that parity is at least epoch - 2. So two operations
// of a kind may be un-received, and may be received in either order. The receive half of an operation starts after this
// rank's send half of it has ended.
//
// Waits. A send half waits for consumed words and, in combine, for the words of other send halves; a receive half waits
// for what send halves write. All ranks must start their operations in the same order.
//
// Masks. No rank sends to a rank that it has masked, or waits for one. With `shrink`, a wait that passes its deadline
// masks the rank. Headers carry masks, and a rank adopts the masks of its peers. A rank that finds itself masked
// records a fault. Rows of a source that is masked during its receive become zeros.
// A rank that waits for a dead rank is late itself. So with `shrink`, a half that has waited for half of its deadline
// adds 1 to the `waiting` word of its rank at every peer. At its end it adds 1 again. If a wait for a rank has lasted
// for its deadline, and the word is odd or has changed meanwhile, the deadline begins anew, at most R times.
//
// Several nodes. All above holds inside a node: there, R, E and the ids are those of the node, and no owner has few
// pairs. Rows for other nodes, and what comes back, travel in legs: common/low_latency_legs.h. There, R counts the
// ranks of all nodes, and so it does in plans and outputs.
#pragma once
#include "common/layout.h"

namespace ep {

enum LlKind : int32_t { kLlDispatch = 0, kLlCombine = 1 };
enum LlPhase : int32_t { kLlSend = 1, kLlReceive = 2, kLlForward = 4 };  // bits of `phases`; forward: several nodes

// The formats in which rows travel. kLlPlain is for rows and partial rows, kLlLogfmt for partial rows in combine, and
// the others for rows in dispatch.
enum LlFormat : int32_t {
  kLlPlain = 0,      // elements travel as they are
  kLlE4m3 = 1,       // e4m3 with float32 scales (fp8.h)
  kLlE4m3Pow2 = 2,   // e4m3 with float32 scales that are powers of two
  kLlE4m3Ue8m0 = 3,  // the same scales as exponent bytes, four in an int32
  kLlLogfmt = 4      // 10-bit codes (logfmt.h), where the owner has more than kLlFewPairs pairs
};

constexpr int kLlKinds = 2;
constexpr int kLlParities = 2;
// Entries for the epochs of un-received operations of a kind: two entries, since at most two are un-received, and two
// more for operations in CUDA graphs, since a graph may be replayed while others are un-received.
constexpr int kLlSlots = 4;
constexpr int64_t kLlMaxTokens = 4096;
constexpr int64_t kLlMaxExperts = 32767;  // expert ids travel as int16
constexpr int kLlMaxGroups = 128;
constexpr int kLlFewPairs = 256;  // combine: an owner with at most this many pairs receives each pair's row as words

EP_HD constexpr int ll_parity(uint64_t epoch) { return static_cast<int>(epoch & 1); }

// ---------------------------------------------------------------------------------------------------------------
// Words: 12 bytes of data and the lower half of the epoch, one 16-byte store on CUDA. On CPUs the epoch is stored last,
// with release order. A reader waits for the words themselves.
//
// A word that no operation used for 2^32 epochs would look new. So every send half also refreshes, in each of its
// arrays of words at each peer, the word of index ll_refreshed(): it writes any data there with the epoch's tag, unless
// it writes that word anyway.
struct alignas(16) LlWord {
  uint32_t unit[3];
  uint32_t epoch;
};
constexpr int kLlWordBytes = 12;  // bytes of data in a word
EP_HD constexpr int64_t ll_words(int64_t bytes) { return ceil_div(bytes, kLlWordBytes); }
EP_HD constexpr int64_t ll_refreshed(uint64_t epoch, int64_t words) {
  return static_cast<int64_t>((epoch >> 1) % static_cast<uint64_t>(words));
}

// The properties of an operation that must be equal on all ranks, then the properties of the sending rank.
struct LlHeader {
  int32_t row_bytes;          // bytes of a row of x or y as it travels, without scales; logfmt: as in kLlPlain
  int32_t scale_bytes;        // scales of one row, 0 without
  int32_t topk;               // K
  int32_t dtype;              // the caller's own code of the element type
  int32_t format;             // LlFormat
  int32_t max_tokens;         // T_max of the call
  int32_t weight_bytes;       // combine: 4 or 8
  int32_t config_hash;        // the lower half
  int32_t num_tokens;         // T of the sending rank
  uint32_t mask[kRankWords];  // bit r % 32 of word r / 32: the sending rank has masked rank r. Kernels fill it in
};
constexpr int kLlHeaderFields = 9;  // the fields that have names
constexpr int kLlComparedFields = 8;
constexpr int kLlHeaderWords = 4;
static_assert(sizeof(LlHeader) == kLlHeaderWords * kLlWordBytes, "a header fills its words");

EP_HD constexpr bool has_rank(const uint32_t* mask, int rank) { return (mask[rank / 32] >> rank % 32 & 1u) != 0; }

// Expert ids: int16 [T,K] without gaps, -1: dropped. They follow the header, kLlIdsPerWord in a word.
constexpr int kLlIdsPerWord = 6;
EP_HD constexpr int64_t ll_id_words(int64_t tokens, int64_t K) { return ceil_div(tokens * K, kLlIdsPerWord); }
// CUDA: a source always sends ll_early_words() words of ids, or more.
constexpr int kLlEarlyWords = 64;  // the largest value of ll_early_words()
EP_HD constexpr int ll_early_words(int64_t max_tokens, int64_t K) {
  const int64_t words = ll_id_words(max_tokens, K);
  return static_cast<int>(words < kLlEarlyWords ? words : kLlEarlyWords);
}

// Weights: [K] of weight_bytes each. Each token has words of its own, at a stride for the communicator's K and 8 bytes.
// Words that the token does not fill are not written. A weight with all bits set means that this combine does not name
// the pair. A NaN with all bits set travels as another NaN. Without weights the owner sends 1.
EP_HD constexpr int64_t ll_weight_words(int64_t K, int64_t weight_bytes) { return ll_words(K * weight_bytes); }

// ---------------------------------------------------------------------------------------------------------------
// Groups of slots. They depend only on T of the rank that owns the tokens, never on the number of SMs. A flag is the
// epoch of the latest operation, of its kind and parity, whose rows of the group are there. A group without rows for a
// rank has no flag there. In combine, a holder flags each group of which it holds a token by the handle, even if no
// pair is named now. The owner waits for a group's flag only if it names a pair of the group.
EP_HD constexpr int ll_group_tokens(int num_tokens) {
  return num_tokens <= kLlMaxGroups ? 1 : static_cast<int>(ceil_div(num_tokens, kLlMaxGroups));
}
EP_HD constexpr int ll_groups(int num_tokens) {
  return static_cast<int>(ceil_div(num_tokens, ll_group_tokens(num_tokens)));
}

// A slot of dispatch: [row | scales]. Quantised rows: scales are float32 [ceil(H / 128)] or exponent bytes, padded with
// zeros to a multiple of 4.
EP_HD constexpr int64_t ll_scales_offset(int64_t row_bytes) { return align_up(row_bytes, kRowAlign); }
EP_HD constexpr int64_t ll_image_bytes(int64_t row_bytes, int64_t scale_bytes) {
  return ll_scales_offset(row_bytes) + align_up(scale_bytes, 4);
}
// A slot of combine: the partial row. In logfmt each group of 128 elements has its place in the row, 256 bytes of
// bfloat16. The place holds the group's codes, or its elements if the group cannot be coded. After the row comes the
// LogfmtScale of each group (logfmt.h).
constexpr int kLlLogfmtGroup = 128;
constexpr int kLlLogfmtScaleBytes = 8;
EP_HD constexpr int64_t ll_logfmt_bytes(int64_t hidden) {
  return 2 * hidden + ceil_div(hidden, kLlLogfmtGroup) * kLlLogfmtScaleBytes;
}

// ---------------------------------------------------------------------------------------------------------------
// The maxima of a communicator, equal on all ranks for its life.
struct LlShape {
  int32_t max_tokens;
  int32_t max_topk;
  int64_t slot_bytes;
  int32_t num_nodes;
  int32_t node_experts;  // experts of each node
};
// Room for the widest row, for a quantised row and a coded one of `hidden` elements, and for K weights as a row.
EP_HD constexpr int64_t ll_slot_bytes(int64_t max_row_bytes, int64_t hidden, int64_t max_topk) {
  int64_t most = max_row_bytes;
  const int64_t others[] = {ll_image_bytes(hidden, 4 * ceil_div(hidden, 128)), ll_logfmt_bytes(hidden), 8 * max_topk};
  for (const int64_t bytes : others) most = bytes > most ? bytes : most;
  return align_up(most, kSlotAlign);
}

// Wakes a rank's thread that sleeps until a peer has written something. On CUDA nothing sleeps.
struct LlBell {
  uint32_t rings;   // grows by one at each ring: the thread sleeps on this word
  uint32_t awaits;  // 1 + the peer for which the thread sleeps, or 0
};

struct LlLayout {
  int64_t consumed;    // u64 [2 kinds][2 parities][R peers]: epoch that the peer has read of what this rank wrote
  int64_t waiting;     // u32 [R]: odd: the rank waits for another one
  int64_t bell;        // LlBell: only on CPUs
  int64_t flag;        // u64 [2 kinds][2 parities][R senders][kLlMaxGroups]
  int64_t ids;         // LlWord [2 parities][R sources][id_words]: header, then expert ids
  int64_t weights;     // LlWord [2 parities][R owners][weight_words]: header, then T_max * token_words of weights
  int64_t pair_words;  // combine: LlWord [2 parities][kLlFewPairs][words_per_row]: the rows of this rank's pairs. On
                       // CPUs a row is stored as it is, and the last of its words shows that the row is there
  int64_t slots;       // [2 kinds][2 parities][R senders][T_max] slots
  int64_t bytes;
  int64_t id_words;      // kLlHeaderWords, plus the words of the ids
  int64_t weight_words;  // kLlHeaderWords, plus the words of the weights
  int64_t token_words;
  int64_t words_per_row;
};
EP_HD constexpr LlLayout ll_layout(int R, const LlShape& shape) {
  const int64_t word = static_cast<int64_t>(sizeof(LlWord));
  const int64_t places = static_cast<int64_t>(kLlKinds) * kLlParities * R;
  LlLayout at{};
  at.id_words = kLlHeaderWords + ll_id_words(shape.max_tokens, shape.max_topk);
  at.token_words = ll_weight_words(shape.max_topk, 8);
  at.weight_words = kLlHeaderWords + shape.max_tokens * at.token_words;
  at.words_per_row = ll_words(shape.slot_bytes);
  at.consumed = 0;
  at.waiting = align_up(8 * places, kSlotAlign);
  at.bell = align_up(at.waiting + 4 * R, kSlotAlign);
  at.flag = align_up(at.bell + static_cast<int64_t>(sizeof(LlBell)), kSlotAlign);
  at.ids = at.flag + places * kLlMaxGroups * 8;
  at.weights = align_up(at.ids + places / kLlKinds * at.id_words * word, kSlotAlign);
  at.pair_words = align_up(at.weights + places / kLlKinds * at.weight_words * word, kSlotAlign);
  at.slots = align_up(at.pair_words + kLlParities * kLlFewPairs * at.words_per_row * word, kSlotAlign);
  at.bytes = at.slots + places * shape.max_tokens * shape.slot_bytes;
  return at;
}

// ---------------------------------------------------------------------------------------------------------------
// The state: in the memory of the rank's device, written by this rank's kernels, and by its host for `mask`. It starts
// as zeros. The epoch of a send half is epoch[kind] + 1; on CUDA the last CTA to enter stores it, after every CTA has
// read it. A send half without its receive half also leaves it in slot_epoch, for the receive half that comes later.
struct LlState {
  uint64_t epoch[kLlKinds];                 // the epoch of the latest send half
  uint64_t slot_epoch[kLlKinds][kLlSlots];  // epochs of un-received operations, by the operation's field `slot`
  uint64_t unsignalled[kLlKinds];           // CUDA: epoch that the next send half stores in consumed words, or 0
  uint64_t ctas_done[kLlKinds][2];          // CUDA: by kind and half: CTAs of the running kernel that have finished
  uint64_t ctas_entered[kLlKinds];          // CUDA: CTAs of the running send half that have read the epoch
  uint32_t mask[kMaxRanks];                 // 1: the rank is masked
  uint64_t waits;                           // the lower half is in this rank's `waiting` words
  uint64_t verdict[kMaxRanks];              // CUDA, with shrink: whether a dispatch has a source's words (LlReceiver)
  uint64_t waited[kMaxRanks];               // CUDA: longest wait for the rank by a thread of the running operation
};

// ---------------------------------------------------------------------------------------------------------------
// The plan: int32 words. R counts the ranks of all N nodes. The tokens of a source are numbered by its slots here or,
// if it is on another node, by the rows of its leg. `rows` is written for t < src_rows[s], and src_info for rows that
// are there.
struct LlPlanLayout {
  int64_t
      layout_range;    // int64 [E_l][R]: the lower half is the number of rows from the source, the upper one the first
  int64_t src_tokens;  // [R]   T of each source
  int64_t src_rows;    // [R]   its tokens that are numbered here; on one node these are src_tokens
  int64_t src_info;    // [E_l][R * T_max]: token of its source that the row is
  int64_t rows;        // [R][T_max][K]: row of each pair, counted over all experts' blocks; -1: none
  int64_t sent_rows;   // several nodes: [T_max][N]: row of this rank's token in the leg to each node; -1: none
  int64_t words;
};
EP_HD constexpr LlPlanLayout ll_plan_layout(int64_t R, int64_t N, int64_t local_experts, int64_t max_tokens,
                                            int64_t K) {
  LlPlanLayout at{};
  at.layout_range = 0;
  at.src_tokens = 2 * local_experts * R;
  at.src_rows = at.src_tokens + (N > 1 ? R : 0);
  at.src_info = at.src_rows + R;
  at.rows = at.src_info + local_experts * R * max_tokens;
  at.sent_rows = at.rows + R * max_tokens * K;
  at.words = at.sent_rows + (N > 1 ? max_tokens * N : 0);
  return at;
}

}  // namespace ep
