// The kernels, declared once. cpu/ and cuda/ implement the same table; one plain argument struct per kernel.
//
// Pointers and streams are integers: nothing here knows torch or Python. On the CPU a kernel runs to its end in the
// calling thread and returns; on CUDA it is enqueued on `stream`. Waits end by themselves: a deadline, an abort or a
// disagreement is recorded in this rank's Board and in State::fault, and every later kernel leaves at once.
#pragma once
#include <cstdint>

#include "common/layout.h"

namespace ep {

using Address = uint64_t;

// A communicator as kernels see it.
struct Comm {
  int32_t rank;
  int32_t num_ranks;
  int32_t num_experts;
  int32_t gate;   // Step held at its test gate, or kNoStep
  int32_t plain;  // CUDA: 1 forces plain loads and stores where bulk copies exist
  int32_t reserved;
  int64_t timeout_ns;
  int64_t pool_bytes[2];       // of every rank's pools, indexed by Pool
  Address control[kMaxRanks];  // every rank's control block as mapped here
  Address pool[2][kMaxRanks];
  Address state;  // State, local
  Address board;  // Board of this rank, as the kernel addresses it
};

// The routing that a handle owns: int32 tensors on the communicator's device.
struct Routing {
  int32_t num_tokens;  // T
  int32_t topk;        // K
  int32_t layout;
  int32_t alignment;  // FLAT: each expert's rows are padded to this
  Address topk_ids;   // [T,K] global expert ids, -1: dropped
  Address send_pos;   // [T,R] position among this rank's rows for rank r, -1: none
  Address pair_pos;   // [T,K] position among this rank's pairs for the expert, -1: dropped
  Address meta;       // [meta_layout.words]
  Address recv_rows;  // [slots,K] per received slot: FLAT row (TOKEN_MAJOR: the slot) of each pair, -1: none
  int64_t slots;      // rows of recv_rows
};

// topk_ids -> Routing's topk_ids, send_pos, pair_pos; meta's rank_count, expert_count, send_chunk_end. CUDA: plan
// writes topk_ids and the counts of each block of tokens, and notify the rest. An id outside [-1, E) is recorded as
// kBadIds (field: the token) and counts as dropped.
struct PlanArgs {
  Comm comm;
  Routing routing;
  Address ids;           // [T,K] as the caller gave them
  Address block_counts;  // CUDA: int32 [plan_blocks(T), plan_block_words(R, E)]
  int32_t id_bytes;      // 4 or 8
  int32_t reserved;
  Address stream;
};

// Exchanges count rows; fills the rest of meta but recv_chunk_end, and, with a ticket, the Board's totals. CUDA: a send
// enqueued behind it does not wait for its end, see State::placed and State::laid_out.
struct NotifyArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address block_counts;  // CUDA: as plan left them
  uint64_t ticket;       // 0: the host does not wait
  Address stream;
};

// Rows and what they expand to, to their slots at their destinations, chunk by chunk. When the pools are too small for
// what some rank sends, an optimistic send tells no rank of any row, on every rank alike; another one is a fault.
// CUDA: rows leave before notify has heard the peers, and are told of when it has.
struct DispatchSendArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address x;  // [T, row_bytes], rows x_stride bytes apart; quantised: [T, row_bytes] elements, which travel as e4m3
  int64_t x_stride;
  Address scales;  // [T, scale_bytes] or 0
  int64_t scale_stride;
  Address weights;     // [T,K] contiguous, weight_bytes each, or 0
  int32_t num_sms;     // CUDA
  int32_t optimistic;  // 1: the host does not know yet whether the pools are large enough
  int32_t quantize;    // 1: see fp8.h; the scales, as the header counts them, are made here, and `scales` is 0
  int32_t element;     // of x where it is quantised: kFloat32, kBFloat16 or kFloat16
  Address stream;
};

// Holds `stream`, where `step` (kDispatchRecv or kCombineRecv) comes next, until this rank's sender of the rows it
// reads runs on all its CTAs, or all of them have left since pools must grow: readers, who wait on SMs for peers, could
// otherwise keep it out. Also until notify has heard all peers, where the routing is `fresh`. CPU: nothing.
struct WaitForSenderArgs {
  Comm comm;
  int32_t step;
  int32_t fresh;  // 1: of a dispatch that makes its routing
  Address stream;
};

// Received slots to output rows, as they arrive. Rows of the output that nothing was sent for become zeros, their
// weights 0 and their expert ids -1. FLAT rows at or past `capacity` are dropped and counted in `overflow`. An
// optimistic expand writes no rows past those that the layout needs, and does nothing where these are more than
// `capacity`, or slots are more than the routing's, or an optimistic send told of none.
struct DispatchRecvArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address tokens;          // [capacity, row_bytes] contiguous
  Address scales;          // [capacity, scale_bytes] or 0
  Address weights;         // FLAT [capacity], TOKEN_MAJOR [capacity,K], or 0
  Address topk_ids;        // TOKEN_MAJOR: int32 [capacity,K]; 0 in FLAT
  Address row_expert_ids;  // FLAT: int32 [capacity]; 0 in TOKEN_MAJOR
  Address expert_count;    // int32 [E_l]: FLAT: rows that are present; TOKEN_MAJOR: rows received, dropped ones too
  Address expert_offset;   // int32 [E_l+1], no entry past capacity
  Address overflow;        // int32 [2]: 1 if rows were dropped, rows required; or 0
  int64_t capacity;        // rows of the output
  int32_t num_sms;         // CUDA
  int32_t fresh;           // 1: also writes the routing's recv_rows and recv_chunk_end; 0: a cached dispatch
  int32_t optimistic;      // 1: the host does not know yet whether `capacity` and the routing's `slots` are enough
  int32_t reserved;
  Address stream;
};

enum Element : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

// Expert rows -> one partial row per received slot, pushed to the token's owner.
struct CombineSendArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address y;  // [rows, hidden] contiguous
  int64_t rows;
  Address weights;  // FLAT [rows], TOKEN_MAJOR [rows,K], or 0: a plain sum; f64 for f64 elements, else f32
  Address extra;    // same shape and type: values that ride back to the owner per pair, or 0
  int64_t hidden;
  int32_t element;
  int32_t num_sms;  // CUDA
  Address stream;
};

// Partial rows -> the owner's tokens, in the order of the ranks they came from.
struct CombineRecvArgs {
  Comm comm;
  Routing routing;
  Header header;
  Address out;    // [T, hidden] contiguous
  Address bias;   // [T, hidden] contiguous or 0
  Address extra;  // out: [T,K] or 0; 0 where nothing rode back
  int64_t hidden;
  int32_t element;
  int32_t num_sms;  // CUDA
  Address stream;
};

// The weights' part of combine's backward, on this rank alone: dots[i] is the sum over h of y[i,h] * rows[i,h], in the
// weights' type and in a fixed order; then each rows[i,h] is times factors[i].
struct WeightGradArgs {
  Address y;        // [num_rows, hidden] contiguous: what combine was given
  Address rows;     // the same shape and type, other memory. In: gradients of the weighted rows. Out: of y
  Address factors;  // [num_rows]; f64 for f64 elements, else f32
  Address dots;     // out: [num_rows] of that type: gradients of the factors
  int64_t num_rows;
  int64_t hidden;
  int32_t element;
  int32_t reserved;
  Address stream;
};

struct KernelTable {
  void (*plan)(const PlanArgs&);
  void (*notify)(const NotifyArgs&);
  void (*dispatch_send)(const DispatchSendArgs&);
  void (*wait_for_sender)(const WaitForSenderArgs&);
  void (*dispatch_recv)(const DispatchRecvArgs&);
  void (*combine_send)(const CombineSendArgs&);
  void (*combine_recv)(const CombineRecvArgs&);
  // CUDA: two in one kernel of num_sms in all, on one stream and without admit. The send is not optimistic.
  void (*dispatch)(const DispatchSendArgs&, const DispatchRecvArgs&);
  void (*combine)(const CombineSendArgs&, const CombineRecvArgs&);
  void (*weight_grad)(const WeightGradArgs&);
};

const KernelTable& cpu_kernels();
#if defined(EP_WITH_CUDA)
const KernelTable& cuda_kernels();
#endif

}  // namespace ep
