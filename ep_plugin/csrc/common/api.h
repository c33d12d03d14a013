// The kernels of dispatch and combine, declared once, with one plain argument struct each. cpu/ and cuda/ implement the
// same table. docs/how-a-token-travels.md explains the steps; common/collectives.h has the kernels of collectives.
//
// Pointers and streams are integers; nothing here depends on torch or Python. The caller owns all memory and must keep
// it until the kernel has ended. On the CPU a kernel runs to its end in the calling thread. On CUDA it is enqueued on
// `stream`. Every wait has a deadline. A timeout, an abort or a disagreement is recorded in this rank's Board and in
// State::fault; every later kernel exits at once.
//
// Shapes: R ranks, T tokens of this rank, K experts per token, E experts, E_l = E / R.
#pragma once
#include <cstdint>

#include "common/layout.h"

namespace ep {

using Address = uint64_t;

// A communicator, as kernels see it.
struct Comm {
  int32_t rank;
  int32_t num_ranks;
  int32_t num_experts;
  int32_t gate;         // tests: the Step that stops at its gate, or kNoStep
  int32_t plain;        // CUDA: 1 uses plain loads and stores where bulk copies exist
  int32_t num_origins;  // the most origins of one dispatch's tokens (common/layout.h)
  int64_t timeout_ns;
  int64_t pool_bytes[2];  // by Pool: size of each rank's pool
  // Tables of addresses, [R] in this rank's device memory. Nothing writes to a table that kernels may read.
  Address control;      // each rank's control block, as mapped in this process
  Address pool[2];      // by Pool: each rank's pool, as mapped in this process
  Address own_control;  // this rank's entries of the tables
  Address own_pool[2];
  Address state;  // State, in this rank's device memory
  Address board;  // this rank's Board, as its device maps it
};
static_assert(sizeof(Comm) == 112, "it does not grow with the ranks");

// The routing of one dispatch: int32 tensors on the communicator's device, which the handle owns.
struct Routing {
  int32_t num_tokens;  // T
  int32_t topk;        // K
  int32_t layout;
  int32_t alignment;  // FLAT: each expert's rows are padded to a multiple of this
  Address topk_ids;   // [T,K] global expert ids, -1: dropped
  Address send_pos;   // [T,R] position among this rank's rows for rank r, -1: none
  Address pair_pos;   // [T,K] position among this rank's pairs for the expert, -1: dropped
  Address meta;       // [meta_layout.words]
  Address recv_rows;  // [slots,K] by received slot: output row of each pair, -1: none
  int64_t slots;      // rows of recv_rows
};

// A group of several nodes, of which the communicator is one.
struct Nodes {
  Address rank_place;   // int32 [num_ranks]: node * (ranks of a node) + the rank's number there; 0: one node
  int32_t num_ranks;    // of all nodes
  int32_t num_experts;  // of all nodes
  int32_t num_chunks;   // into which each rank cuts its tokens
  int32_t node;         // this rank's
  Address waits;        // int64 [kWaitedFor + N], enum NodeWaits; 0: nobody measures waits
};

// The counts that ranks of other nodes have sent, as LayoutArgs::messages has them. The tokens of one chunk, one node's
// after the other's, are the tokens of one dispatch inside the node. Its origins are the nodes node - 1, node - 2, ....
struct Origins {
  Address messages;  // int64 [N, message_words] by node; 0: the tokens are this rank's own
  int32_t chunk;
  int32_t padded;  // the tokens of each origin, of which the last ones have no experts; 0: as many as its message says
};

// Computes where each token goes: writes Routing's topk_ids, send_pos and pair_pos, and meta's rank_count, expert_count
// and send_chunk_end. On CUDA plan writes topk_ids and the counts of each block of tokens, and notify writes the rest;
// if notify has run before, with counts of origins, `positions` writes send_pos, pair_pos and send_chunk_end. Counts
// that differ from those of notify are then recorded as kBadCounts (field: the rank, or R + the expert). With several
// nodes, ids name experts of all nodes, and topk_ids those of this node; pairs for others count as dropped. An id
// outside [-1, E) is recorded as kBadIds (field: the token) and counts as dropped.
struct PlanArgs {
  Comm comm;
  Routing routing;
  Nodes nodes;
  Origins origins;       // with messages: notify has run before with them
  Address ids;           // [T,K] as the caller gave them
  Address block_counts;  // CUDA: int32 [plan_blocks(T), plan_block_words(R, E)]
  int32_t id_bytes;      // 4 or 8
  int32_t reserved;
  Address stream;
};

// Exchanges counts with all ranks. Writes the rest of meta except recv_chunk_end and, with a ticket, the Board's
// totals. With the counts of origins it needs no plan: their sums are this rank's counts, and the sum of their tokens
// is its T. Else, on CUDA, a send that follows it starts before it ends, see State::positions_ready and
// State::counts_ready.
struct NotifyArgs {
  Comm comm;
  Routing routing;
  Header header;
  Nodes nodes;
  Origins origins;
  Address block_counts;  // CUDA: as plan left them
  uint64_t ticket;       // 0: the host does not wait for the totals
  int32_t segment;       // the place of the totals on the board; 0 on one node
  int32_t reserved;
  Address stream;
};

// Sends rows and their heads to their slots at the destinations, chunk by chunk. If the pools are too small for the
// rows of some rank, an optimistic send signals no rows, on all ranks alike; any other send records a fault.
// On CUDA rows leave while notify waits for peers. They are signalled when notify has the counts of all peers. From
// then on the receive may start, if it is the next kernel in the stream.
struct DispatchSendArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address x;  // [T, row_bytes], rows x_stride bytes apart. If quantised: [T, row_bytes] elements, sent as e4m3
  int64_t x_stride;
  Address scales;  // [T, scale_bytes] or 0
  int64_t scale_stride;
  Address weights;     // [T,K] contiguous, weight_bytes each, or 0
  int32_t num_sms;     // CUDA
  int32_t optimistic;  // 1: enqueued before the host knows whether the pools are large enough
  int32_t quantize;    // 1: rows become e4m3 (fp8.h); the kernel computes the scales, and `scales` is 0
  int32_t element;     // type of x if it is quantised: kFloat32, kBFloat16 or kFloat16
  Address stream;
};

// Copies received slots to output rows as they arrive. Output rows for which nothing was sent become zeros, with weight
// 0 and expert id -1. Rows at or past `capacity` are dropped; `overflow` says so. An optimistic receive writes no rows
// past the last one that the layout needs. It does nothing if the layout needs more than `capacity` rows, if there are
// more slots than the routing has, or if an optimistic send signalled no rows.
struct DispatchRecvArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address tokens;          // [capacity, row_bytes] contiguous
  Address scales;          // [capacity, scale_bytes] or 0
  Address weights;         // FLAT [capacity], TOKEN_MAJOR [capacity,K], or 0
  Address topk_ids;        // TOKEN_MAJOR: int32 [capacity,K], int64 if wide_ids; 0 in FLAT
  Address row_expert_ids;  // FLAT: int32 [capacity]; 0 in TOKEN_MAJOR
  Address expert_count;    // int32 [E_l]: FLAT: rows in the output; TOKEN_MAJOR: rows received, dropped ones too
  Address expert_offset;   // int32 [E_l+1]; no entry is larger than capacity (FLAT)
  Address overflow;        // int32 [4]: 1 if rows were dropped, the rows required, MetaLayout::rail_overflow; or 0
  int64_t capacity;        // rows of the output
  int32_t num_sms;         // CUDA
  int32_t fresh;           // 1: also writes the routing's recv_rows and recv_chunk_end; 0: a cached dispatch
  int32_t optimistic;      // 1: enqueued before the host knows whether `capacity` and the routing's `slots` suffice
  int32_t wide_ids;        // 1: topk_ids are int64
  int32_t in_order;        // CUDA. 1: starts after all work on the stream; 0: when the send ahead of it lets it
  int32_t reserved;
  Address stream;
};

enum Element : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

// Reduces the expert rows of each received slot to one partial row, and stores it in the combine pool of the token's
// owner.
struct CombineSendArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address y;  // [rows, hidden] contiguous
  int64_t rows;
  Address weights;  // FLAT [rows], TOKEN_MAJOR [rows,K], or 0: a plain sum; f64 for f64 elements, else f32
  Address extra;    // same shape and type: values that return to the owners, or 0. They travel if weight_bytes says so
  int64_t hidden;
  int32_t element;
  int32_t num_sms;  // CUDA
  int32_t per_row;  // TOKEN_MAJOR. 1: all K extra values of a row travel; 0: values of other ranks' experts are zeros
  int32_t reserved;
  Address stream;
};

// Sums the partial rows of each token, in the order of the ranks that sent them, and rounds once. A sum starts from the
// bias.
struct CombineRecvArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address out;    // [T, hidden] contiguous
  Address bias;   // [T, hidden] contiguous or 0
  Address extra;  // out: [T,K], the sums of the extra values in the order of the ranks; or 0
  int64_t hidden;
  int32_t element;
  int32_t num_sms;    // CUDA
  int32_t wide_bias;  // 1: the bias is float32 where elements are of 16 bits; 0: it is of the elements' type
  int32_t in_order;   // CUDA. As in DispatchRecvArgs
  Address stream;
};

// Backward of combine's weights, on this rank alone: dots[i] is the sum over h of y[i,h] * rows[i,h], in the weights'
// type and in a fixed order. Then each rows[i,h] is multiplied by factors[i], in place.
struct WeightGradArgs {
  Address y;        // [num_rows, hidden] contiguous: the input of combine
  Address rows;     // same shape and type, other memory. In: gradients of the weighted rows. Out: gradients of y
  Address factors;  // [num_rows]; f64 for f64 elements, else f32
  Address dots;     // out: [num_rows] of that type: gradients of the factors
  int64_t num_rows;
  int64_t hidden;
  int32_t element;
  int32_t reserved;
  Address stream;
};

// Quantises rows to e4m3 with scales (fp8.h), as a dispatch send with `quantize` does.
struct QuantizeArgs {
  Address x;  // [num_rows, hidden], rows x_stride bytes apart
  int64_t x_stride;
  Address rows;    // out: [num_rows, hidden] e4m3, contiguous
  Address scales;  // out: float32 [num_rows, ceil(hidden / 128)], contiguous
  int64_t num_rows;
  int64_t hidden;
  int32_t element;  // type of x: kFloat32, kBFloat16 or kFloat16
  int32_t reserved;
  Address stream;
};

// Copies the rows, weights, scales and ids of this rank's tokens for other nodes into the buffers that a rail sends.
// rail_rows has the place of each token in the buffers, once for each node that it goes to. A place outside
// [-1, num_rows) is recorded as kBadHandle (field: the token) and skipped.
struct PackArgs {
  Comm comm;
  Address x;  // [num_tokens, row_bytes], rows x_stride bytes apart; 0: only ids are packed
  int64_t x_stride;
  int64_t row_bytes;
  Address rows;     // out: [num_rows, row_bytes] contiguous
  Address weights;  // [num_tokens, weight_bytes] contiguous, or 0
  int64_t weight_bytes;
  Address packed_weights;  // out: [num_rows, weight_bytes] contiguous
  Address scales;          // [num_tokens, scale_bytes], rows scale_stride bytes apart, or 0
  int64_t scale_stride;
  int64_t scale_bytes;
  Address packed_scales;  // out: [num_rows, scale_bytes] contiguous
  Address ids;            // int32 [num_tokens, topk] contiguous, or 0
  Address packed_ids;     // out: int32 [num_rows, topk] contiguous
  Address rail_rows;      // int32 [num_tokens, num_nodes]: row of the buffers, -1: the token does not go to that node
  int64_t num_rows;       // rows of the buffers
  int32_t topk;
  int32_t num_tokens;
  int32_t num_nodes;
  int32_t num_sms;  // CUDA
  Address stream;
};

// Adds the sums of a token's nodes, in the order of the nodes, to the bias, and rounds once: the last step of a combine
// over several nodes. A place outside [-1, num_rows) is recorded as kBadHandle (field: the token).
struct CombineAddArgs {
  Comm comm;
  Address own;           // [num_tokens, hidden] contiguous: the sums of this rank's node
  Address landed;        // [num_rows, hidden] contiguous: the sums that came over the rail
  Address rail_rows;     // int32 [num_tokens, num_nodes]: row of `landed`, -1: none. The own node's column is not read
  Address bias;          // [num_tokens, hidden] contiguous or 0
  Address out;           // [num_tokens, hidden] contiguous
  Address own_extra;     // [num_tokens, topk] or 0. This and the next two: f64 for f64 elements, else f32
  Address landed_extra;  // [num_rows, topk]
  Address extra_out;     // out: [num_tokens, topk]: the sums of own_extra and landed_extra
  int64_t hidden;
  int64_t num_rows;  // rows of `landed`
  int32_t topk;
  int32_t element;
  int32_t num_tokens;
  int32_t num_nodes;
  int32_t node;       // this rank's node
  int32_t num_sms;    // CUDA
  int32_t wide_bias;  // as in CombineRecvArgs
  int32_t reserved;
  Address stream;
};

// Load statistics: adds counts to sums, word by word.
struct AddCountsArgs {
  Address sums;    // int64 [num_rows, num_columns] contiguous
  Address counts;  // int32 [num_rows, num_columns], rows row_stride words apart
  int64_t row_stride;
  int64_t num_rows;
  int64_t num_columns;
  Address stream;
};

// The layout of a dispatch: counts the tokens that go to each rank, to each node and to each expert. A token counts
// once for each of them. An id outside [0, E) counts as dropped. The kernel needs no communicator.
//
// With `messages` it counts each of the chunks [T * c / C, T * (c + 1) / C) and writes the message that each node gets
// (common/layout.h), and numbers the tokens of a chunk that go to each other node. Where `padded` is no room for all
// of them, it leaves the last ones out. N nodes.
struct LayoutArgs {
  Address ids;        // [T,K] contiguous
  Nodes nodes;        // num_chunks 0 stands for 1
  Address counts;     // out: int32 [R + num_nodes + E]: tokens of each rank, of each node, of each expert; or 0
  Address in_rank;    // out: bool [T,R]: whether the token has an expert on the rank; or 0
  Address messages;   // out: int64 [2, N, message_words] by node: the first half, and of the other this node's
                      // rail_overflow and waited. Or 0: then this and what follows is not used
  Address rail_rows;  // out: int32 [T,N]: the token's number among those of its chunk for the node; -1: none, left
                      // out, own node
  Address own_ids;    // out: int32 [T,K]: the ids; -1: dropped
  Header header;      // of the messages
  int32_t num_tokens;
  int32_t topk;
  int32_t num_nodes;  // 0: nodes are not counted
  int32_t id_bytes;   // 4 or 8
  int32_t padded;     // the most rows of a chunk for another node; 0: any number
  int32_t reserved;
  Address stream;
};

// Gives the rows of a dispatch over several nodes their places: in the buffers that the rail sends, and in the common
// output of its segments, which notify has laid out one by one. Output rows are in the order of the ranks that sent
// them, and of their chunks. N nodes, M = num_chunks + 1 segments.
struct PlaceArgs {
  Comm comm;
  Nodes nodes;
  Address metas;      // int32 [M, meta_layout.words]: rewrites what places rows in the output
  Address messages;   // int64 [2, N, message_words] as LayoutArgs has them. The second half is read for nodes.waits
  Address rail_rows;  // int32 [T,N] as layout left it. Becomes the row of the buffers; -1: none
  int32_t num_tokens;
  int32_t padded;     // rows of each message's chunk in the buffers; 0: as many as it has
  int32_t alignment;  // each local expert's rows begin at a multiple of this
  int32_t reserved;
  Address stream;
};

// Low latency: common/low_latency_args.h.
struct LlDispatchArgs;
struct LlCombineArgs;

struct KernelTable {
  void (*plan)(const PlanArgs&);
  void (*positions)(const PlanArgs&);  // on the CPU nothing is left to do
  void (*notify)(const NotifyArgs&);
  void (*place)(const PlaceArgs&);
  void (*dispatch_send)(const DispatchSendArgs&);
  void (*dispatch_recv)(const DispatchRecvArgs&);
  void (*combine_send)(const CombineSendArgs&);
  void (*combine_recv)(const CombineRecvArgs&);
  // Sends and receives in one kernel of num_sms SMs, on one stream. Not optimistic. On the CPU it sends, then receives.
  void (*dispatch)(const DispatchSendArgs&, const DispatchRecvArgs&);
  void (*combine)(const CombineSendArgs&, const CombineRecvArgs&);
  void (*weight_grad)(const WeightGradArgs&);
  void (*quantize)(const QuantizeArgs&);
  void (*pack)(const PackArgs&);
  void (*combine_add)(const CombineAddArgs&);
  void (*add_counts)(const AddCountsArgs&);
  void (*layout)(const LayoutArgs&);
  void (*ll_dispatch)(const LlDispatchArgs&);
  void (*ll_combine)(const LlCombineArgs&);
  bool low_latency_over_nodes;  // whether the last two serve several nodes
};

const KernelTable& cpu_kernels();
const KernelTable& cuda_kernels();  // only in builds with CUDA

}  // namespace ep
