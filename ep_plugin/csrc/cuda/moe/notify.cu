// Notify: the ranks exchange counts, and each computes where the rows that it receives go.
//
// Roles. CTA 0 exchanges counts: a warp writes this rank's count row to its peers, waits for their rows, checks them,
// and stores the counts in shared memory. Peers go round the warps. Then one warp lays out the FLAT rows by expert,
// another the slots by source. The other CTAs compute the positions of this rank's tokens at the same time
// (positions.cuh) and wait for no peer. The last of them signals the send (State::positions_ready), which then may move
// rows. CTA 0 signals the send when the counts of all peers are known (State::counts_ready). Then it may signal rows.
// With counts of origins CTA 0 is alone, and ep_positions computes the positions later.
// Buffers. A count row (common/layout.h) is 64-bit words that carry their own epoch, so it needs no flag. There are two
// rows for each pair of ranks, used in turn. A row is overwritten after its reader's consumed word has reached epoch -
// 2.
// Memory order. Count words are relaxed: each is complete by itself. The totals are stored before the ticket, which has
// release order at system scope because the host reads them.
// Nothing from a count row is used as a bound or an index before it is checked.
#include "common/nodes.h"
#include "cuda/core/launch.cuh"
#include "cuda/moe/kernels.h"
#include "cuda/moe/positions.cuh"
#include "cuda/moe/signals.cuh"

namespace ep::cuda {

namespace {

constexpr int kPeerWarps = kTokenWarp;  // warps of CTA 0 that exchange counts. One more lays out the ranks
constexpr int kNotifyThreads = (kPeerWarps + 1) * kWarp;

struct Shared {
  int32_t num_tokens[kMaxRanks];                         // tokens of each source, checked
  int32_t rail_overflow[kRailOverflowWords][kMaxRanks];  // what each source says was left out
  int64_t own_rail_overflow[kRailOverflowWords];
  int64_t own_tokens;  // T of this rank
  int64_t max_sent;
};

// In shared memory behind `counts`, both checked: [R][E_l] the pairs of each source for each local expert, then [R][R]
// the tokens of each source for each destination.
__device__ int32_t* received(const Comm& comm) { return counts + plan_block_words(comm.num_ranks, comm.num_experts); }
__device__ int32_t* rank_counts(const Comm& comm) { return received(comm) + comm.num_experts; }
int64_t shared_words(int R, int E) { return plan_block_words(R, E) + E + int64_t{R} * R; }

__device__ int parity_of(const Run& run) { return static_cast<int>(run.epoch & 1); }

constexpr int kWordsAtOnce = 12;  // words of a count row that a lane loads at a time

// One warp: waits until `peer` has read the count row that this rank will overwrite.
__device__ bool row_is_free(const Run& run, int peer) {
  const uint64_t free_at = run.epoch < 2 ? 0 : run.epoch - 2;
  const bool ok =
      peer::wait_at_least(run, consumed_word(run.comm, run.comm.rank, kConsumedCounts, peer), free_at, peer);
  return __all_sync(kAllLanes, ok) != 0;
}

// The words of a count row of this notify.
__device__ int row_words(const NotifyArgs& args) {
  return count_row_words(args.comm.num_ranks, args.comm.num_experts, has_origins(args) ? args.comm.num_origins : 0);
}

// Word `index` of the counts of the origins in a count row: the origin's rows if `local` is -1, else its pairs for that
// local expert.
struct OriginWord {
  int origin, local;
  __device__ OriginWord(const Comm& comm, int index)
      : origin(index / (1 + local_experts(comm))), local(index % (1 + local_experts(comm)) - 1) {}
};

// One warp: writes this rank's count row to `peer`.
__device__ void send_counts(const Run& run, const NotifyArgs& args, int peer, const Shared& shared) {
  const Comm& comm = run.comm;
  const uint32_t* header = reinterpret_cast<const uint32_t*>(&args.header);
  uint64_t* to = count_words(comm, peer, parity_of(run), comm.rank);
  const int R = comm.num_ranks, for_experts = kHeaderWords + R;
  const int for_origins = for_experts + local_experts(comm), words = row_words(args);
  for (int i = lane_id(); i < for_origins; i += kWarp) {
    const int count = i - kHeaderWords + (i < for_experts ? 0 : peer * local_experts(comm));
    uint32_t word = i < kHeaderWords ? header[i] : counts[count];
    if (i >= 2 * kComparedFields && i < kHeaderWords) word = static_cast<uint32_t>(shared.own_tokens >> (i & 1) * 32);
    peer::store(to + i, tagged(run.epoch, word));
  }
  for (int i = for_origins + lane_id(); i < words; i += kWarp) {
    if (i < for_origins + kRailOverflowWords) {
      peer::store(to + i, tagged(run.epoch, static_cast<uint32_t>(shared.own_rail_overflow[i - for_origins])));
      continue;
    }
    const OriginWord word(comm, i - for_origins - kRailOverflowWords);
    const int key = word.local < 0 ? peer : R + peer * local_experts(comm) + word.local;
    const int64_t count = counts_of(comm, args.nodes, args.origins, word.origin).parts[key];
    peer::store(to + i, tagged(run.epoch, static_cast<uint32_t>(count)));
  }
}

// One warp, one lane per word: whether the header in a count row describes the same operation as this rank's header.
// Also finds the source's T.
__device__ bool check_header(const Run& run, const NotifyArgs& args, int source, uint32_t word, int64_t* tokens) {
  const uint32_t* mine = reinterpret_cast<const uint32_t*>(&args.header);
  const uint64_t low = __shfl_sync(kAllLanes, word, lane_id() & ~1), high = __shfl_sync(kAllLanes, word, lane_id() | 1);
  const int64_t seen = static_cast<int64_t>(high << 32 | low);
  *tokens = __shfl_sync(kAllLanes, seen, 2 * kComparedFields);
  const bool compared = lane_id() < 2 * kComparedFields;
  const unsigned differ = __ballot_sync(kAllLanes, compared && word != mine[compared ? lane_id() : 0]);
  if (differ == 0) return true;
  const int first = __ffs(differ) - 1, field = first / 2;
  if (lane_id() == first)
    fail(run.comm, kDisagree, kNotify, source, field, reinterpret_cast<const int64_t*>(&args.header)[field], seen);
  return false;
}

// Each lane reads kWordsAtOnce words of a count row, from `first` on, kWarp apart; -1 past the end. While a word is
// missing, it polls all of them again. If it polled one word after the other, each word would still cost a poll after
// the last word has arrived. The time of lane 0 counts as waited.
__device__ bool read_words(const Run& run, const uint64_t* row, int words, int first, int source, int32_t* values) {
  Deadline deadline;
  for (;;) {
    uint64_t held[kWordsAtOnce], missing = 0;
    bool all_here = true;
#pragma unroll
    for (int j = 0; j < kWordsAtOnce; ++j) {
      const int i = first + j * kWarp;
      held[j] = i < words ? peer::poll(row + i) : tagged(run.epoch, UINT32_MAX);
    }
#pragma unroll
    for (int j = 0; j < kWordsAtOnce; ++j) {
      if (!has_tag(held[j], run.epoch)) {
        all_here = false;
        missing = held[j];
      }
      values[j] = static_cast<int32_t>(static_cast<uint32_t>(held[j]));
    }
    if (all_here) {
      if (lane_id() == 0) deadline.count(run.comm, source);
      return true;
    }
    if (!deadline.keep_waiting(run, source, 0, run.epoch & UINT32_MAX, missing >> 32)) return false;
  }
}

// One warp: waits for a source's count row and checks that its operation is the same and that every count is within
// [0, T of that source]. Stores the counts and T in shared memory, and the counts of the origins in the handle.
__device__ bool receive_counts(const Run& run, const NotifyArgs& args, int source, Shared& shared) {
  const Comm& comm = run.comm;
  const Meta meta = meta_of(comm, args.routing);
  const int R = comm.num_ranks, O = comm.num_origins, per_rank = local_experts(comm), words = row_words(args);
  const uint64_t* row = count_words(comm, comm.rank, parity_of(run), source);
  int64_t tokens = 0;
  for (int base = 0; base < words; base += kWordsAtOnce * kWarp) {
    int32_t values[kWordsAtOnce];
    if (!__all_sync(kAllLanes, read_words(run, row, words, base + lane_id(), source, values))) return false;
    if (base == 0 && !check_header(run, args, source, static_cast<uint32_t>(values[0]), &tokens)) return false;
    bool ok = tokens >= 0 && tokens <= kMaxTokens;
    if (!ok) fail(comm, kBadData, kNotify, source, 0, kMaxTokens, tokens);
#pragma unroll
    for (int j = 0; j < kWordsAtOnce; ++j) {
      const int i = base + j * kWarp + lane_id() - kHeaderWords;
      if (i < 0 || i >= words - kHeaderWords) continue;
      const int after = i - R - per_rank;
      if (after >= 0 && after < kRailOverflowWords) {
        shared.rail_overflow[after][source] = values[j];
        continue;
      }
      if (values[j] < 0 || values[j] > tokens) ok = fail(comm, kBadData, kNotify, source, i, tokens, values[j]);
      if (i < R) {
        rank_counts(comm)[source * R + i] = values[j];
      } else if (i < R + per_rank) {
        received(comm)[source * per_rank + i - R] = values[j];
      } else {
        const OriginWord word(comm, after - kRailOverflowWords);
        const int64_t place = static_cast<int64_t>(source) * O + word.origin;
        if (word.local < 0)
          meta.origin_end[place] = values[j];  // lay_out_ranks() makes it the end
        else
          meta.origin_rows[place * per_rank + word.local] = values[j];
      }
    }
    if (!__all_sync(kAllLanes, ok)) return false;
  }
  if (lane_id() == 0) shared.num_tokens[source] = static_cast<int32_t>(tokens);
  return true;
}

// One lane per source: computes where the origins of a source's `rows` slots end. They must add up.
__device__ bool lay_out_origins(const NotifyArgs& args, const Meta& meta, int source, int64_t rows) {
  const int O = args.comm.num_origins;
  int32_t* ends = meta.origin_end + static_cast<int64_t>(source) * O;
  int64_t end = has_origins(args) ? 0 : rows;
  for (int origin = 0; origin < O; ++origin) {
    if (has_origins(args)) end += ends[origin];
    ends[origin] = static_cast<int32_t>(min(end, rows));
  }
  return end == rows || fail(args.comm, kBadData, kNotify, source, 0, rows, end);
}

// One lane per local expert: the pairs of a source's origins must add up to `pairs`.
__device__ bool check_origins(const NotifyArgs& args, const Meta& meta, int source, int local, int32_t pairs) {
  const int O = args.comm.num_origins, per_rank = local_experts(args.comm);
  int32_t* rows = meta.origin_rows + static_cast<int64_t>(source) * O * per_rank + local;
  int64_t sum = has_origins(args) ? 0 : pairs;
  for (int origin = 0; origin < O; ++origin) {
    if (has_origins(args))
      sum += rows[origin * per_rank];
    else
      rows[origin * per_rank] = origin == 0 ? pairs : 0;
  }
  return sum == pairs || fail(args.comm, kBadData, kNotify, source, 1 + local, pairs, sum);
}

// One warp: adds up what the ranks of all nodes have left out, as the sources say.
__device__ void write_rail_overflow(const NotifyArgs& args, const Meta& meta, const Shared& shared) {
  int64_t left_out = 0, most = 0;
  for (int source = lane_id(); has_origins(args) && source < args.comm.num_ranks; source += kWarp) {
    left_out += static_cast<uint32_t>(shared.rail_overflow[kLeftOut][source]);
    most = max(most, static_cast<int64_t>(static_cast<uint32_t>(shared.rail_overflow[kMostRows][source])));
  }
  const int64_t all = sum_of_warp(left_out), of_all = max_of_warp(most);
  if (lane_id() != 0) return;
  meta.rail_overflow[kLeftOut] = static_cast<int32_t>(min(all, int64_t{INT32_MAX}));
  meta.rail_overflow[kMostRows] = static_cast<int32_t>(min(of_all, int64_t{INT32_MAX}));
}

// One warp, whose lanes share the ranks: computes the order of the slots that this rank receives, and the bases of
// partial rows.
__device__ bool lay_out_ranks(const Run& run, const NotifyArgs& args, Shared& shared) {
  const Comm& comm = run.comm;
  const Meta meta = meta_of(comm, args.routing);
  const int R = comm.num_ranks, me = comm.rank;
  const int32_t* count = rank_counts(comm);
  const int O = comm.num_origins;
  int64_t most_slots = 0, most_sent = 0;
  int32_t rows = 0;
  bool ok = true;
  for (int a = lane_id(); a < R; a += kWarp) {
    int64_t send_base = 0, combine_base = 0, received = 0, slots = 0, sent = 0;
    for (int b = 0; b < R; ++b) {
      send_base += b < a ? count[me * R + b] : 0;
      combine_base += b < me ? count[a * R + b] : 0;
      received += b <= a ? count[b * R + me] : 0;
      slots += count[b * R + a];
      meta.rank_prefix[b * R + a] = static_cast<int32_t>(slots);
      sent += count[a * R + b];
      rows = max(rows, count[a * R + b]);
    }
    most_slots = max(most_slots, slots);
    most_sent = max(most_sent, sent);
    meta.send_base[a] = static_cast<int32_t>(send_base);
    meta.combine_base[a] = static_cast<int32_t>(combine_base);
    meta.recv_offset[a + 1] = static_cast<int32_t>(received);
    for (int origin = 0; origin < O; ++origin)
      meta.token_base[a * O + origin] = static_cast<int32_t>(received - count[a * R + me]);
    if (a == R - 1) *meta.token_rows = static_cast<int32_t>(received);
    meta.src_tokens[a] = shared.num_tokens[a];
    ok = lay_out_origins(args, meta, a, count[a * R + me]) && ok;
  }
  if (!__all_sync(kAllLanes, ok)) return false;
  const int64_t max_sent = max_of_warp(most_sent), most = max(max_of_warp(most_slots), max_sent);
  const int64_t max_rows = max_of_warp(rows);
  if (most > INT32_MAX) {
    if (lane_id() == 0) fail(comm, kTooSmall, kNotify, me, 0, INT32_MAX, most);
    return false;
  }
  if (lane_id() == 0) {
    meta.recv_offset[0] = 0;
    *meta.max_rows = static_cast<int32_t>(max_rows);
    shared.max_sent = max_sent;
  }
  write_rail_overflow(args, meta, shared);
  return true;
}

// One warp, consecutive experts per lane: computes where each local expert's FLAT rows start, and where each source's
// rows start among them.
__device__ bool lay_out_experts(const Run& run, const NotifyArgs& args) {
  const Comm& comm = run.comm;
  const Meta meta = meta_of(comm, args.routing);
  const int R = comm.num_ranks, O = comm.num_origins;
  const int per_rank = local_experts(comm), of_lane = static_cast<int>(ceil_div(per_rank, kWarp));
  const int begin = min(lane_id() * of_lane, per_rank), end = min(begin + of_lane, per_rank);
  const uint32_t alignment = args.routing.layout == kFlat ? static_cast<uint32_t>(args.routing.alignment) : 1;
  const int32_t* from = received(comm);
  const auto aligned = [&](int64_t rows) {
    return static_cast<int64_t>((static_cast<uint32_t>(rows) + alignment - 1) / alignment) * alignment;
  };
  int64_t through = 0;
  bool ok = true;
  for (int local = begin; local < end; ++local) {
    int64_t rows = 0;
    for (int source = 0; source < R; ++source) {
      const int32_t pairs = from[source * per_rank + local];
      ok = check_origins(args, meta, source, local, pairs) && ok;
      rows += pairs;
    }
    through += aligned(rows);
  }
  if (!__all_sync(kAllLanes, ok)) return false;
  int64_t start = -through;
  through = sum_through(through);
  start += through;
  for (int local = begin; local < end; ++local) {
    int64_t rows = 0;
    for (int source = 0; source < R; ++source) {
      for (int origin = 0; origin < O; ++origin)
        meta.flat_base[(source * O + origin) * per_rank + local] = static_cast<int32_t>(start + rows);
      rows += from[source * per_rank + local];
    }
    meta.expert_offset[local] = static_cast<int32_t>(start);
    meta.expert_rows[local] = static_cast<int32_t>(rows);
    start += aligned(rows);
  }
  const int64_t all = __shfl_sync(kAllLanes, through, kWarp - 1);
  if (lane_id() == 0) meta.expert_offset[per_rank] = static_cast<int32_t>(all);
  if (all <= INT32_MAX) return true;
  if (lane_id() == 0) fail(comm, kTooSmall, kNotify, comm.rank, 1, INT32_MAX, all);
  return false;
}

// All threads: writes the totals for the host, then the ticket, which shows that they are from this notify.
__device__ void publish_totals(const NotifyArgs& args, const Shared& shared) {
  const Comm& comm = args.comm;
  const Meta meta = meta_of(comm, args.routing);
  const int per_rank = local_experts(comm);
  int64_t* totals = board_totals(comm, args.segment);
  for (int local = threadIdx.x; local < per_rank; local += blockDim.x)
    totals[kTotals + local] = meta.expert_rows[local];
  if (threadIdx.x == 0) {
    totals[kTotalSlots] = meta.recv_offset[comm.num_ranks];
    totals[kTotalRows] = meta.expert_offset[per_rank];
    totals[kTotalMaxRows] = *meta.max_rows;
    totals[kTotalMaxSent] = shared.max_sent;
  }
  __syncthreads();
  if (threadIdx.x == 0) ptx::st_release_sys(&board_of(comm).ticket, args.ticket);
}

// All threads: sums the counts of all origins, in shared memory, and their tokens. Joins the CTA.
__device__ void sum_origins(const NotifyArgs& args, Shared& shared) {
  for (int i = threadIdx.x; i <= num_keys(args.comm); i += blockDim.x) {
    int64_t sum = 0;
    for (int origin = 0; origin < args.comm.num_origins; ++origin) {
      const OriginCounts of_origin = counts_of(args.comm, args.nodes, args.origins, origin);
      sum += i == 0 ? of_origin.tokens : of_origin.parts[i - 1];
    }
    if (i == 0)
      shared.own_tokens = sum;
    else
      counts[i - 1] = static_cast<int32_t>(sum);  // one that wraps is refused by those who receive it
  }
  if (warp_id() == 0) {
    int64_t left_out = 0, most = 0;
    for (int node = lane_id(); node < num_nodes_of(args.comm, args.nodes); node += kWarp) {
      const int64_t* rail_overflow = rail_overflow_of(args.comm, args.nodes, args.origins, node);
      left_out += rail_overflow[kLeftOut];
      most = max(most, rail_overflow[kMostRows]);
    }
    const int64_t all = sum_of_warp(left_out), of_all = max_of_warp(most);
    if (lane_id() == 0) {
      shared.own_rail_overflow[kLeftOut] = min(all, int64_t{INT32_MAX});
      shared.own_rail_overflow[kMostRows] = min(of_all, int64_t{INT32_MAX});
    }
  }
  __syncthreads();
}

// All threads: sums the counts of all blocks or origins, in shared memory, and writes them to the handle.
__device__ void count_all(const NotifyArgs& args, Shared& shared) {
  if (args.origins.messages != 0) {
    sum_origins(args, shared);
  } else {
    if (threadIdx.x == 0) shared.own_tokens = args.header.num_tokens;
    sum_block_counts(args.comm, args.block_counts, plan_blocks(args.routing.num_tokens));  // joins the CTA
  }
  int32_t* rank_count = meta_of(args.comm, args.routing).rank_count;  // expert_count follows it
  for (int i = threadIdx.x; i < num_keys(args.comm); i += blockDim.x) rank_count[i] = counts[i];
}

// All threads of a CTA that has computed the positions of its block. The last of these CTAs signals that the send may
// move rows.
__device__ void signal_positions_ready(const Comm& comm) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  State& state = state_of(comm);
  if (ptx::atom_add_acq_rel_gpu(&state.ctas_positioned, 1) + 1 != gridDim.x - 1) return;
  state.ctas_positioned = 0;
  ptx::st_release_gpu(&state.positions_ready, state.epoch[kDispatchSend - 1] + 1);
}

// All threads of CTA 0 call it when the counts of all peers are known: signals that rows may be signalled and received.
// No send advances its epoch before this kernel ends, so the send's next epoch is known here.
__device__ void signal_counts_ready(const Comm& comm) {
  __syncthreads();
  State& state = state_of(comm);
  if (threadIdx.x == 0) ptx::st_release_gpu(&state.counts_ready, state.epoch[kDispatchSend - 1] + 1);
}

// All threads of CTA 0. `is_free`: whether the count rows at this warp's peers may be overwritten.
__device__ void exchange(const NotifyArgs& args, const Run& run, bool is_free, Shared& shared) {
  const Comm& comm = args.comm;
  const int warp = warp_id();
  bool ok = is_free && !faulted(comm);  // plan may have failed
  count_all(args, shared);
  if (comm.gate == kNotify) ok = __syncthreads_and(threadIdx.x != 0 || hold_at_gate(run)) && ok;
  ok = __all_sync(kAllLanes, ok) != 0;
  if (warp < kPeerWarps) {
    for (int peer = warp; ok && peer < comm.num_ranks; peer += kPeerWarps) send_counts(run, args, peer, shared);
    for (int peer = warp; ok && peer < comm.num_ranks; peer += kPeerWarps) ok = receive_counts(run, args, peer, shared);
  }
  if (!__syncthreads_and(ok)) return;
  if (warp == 0) ok = lay_out_experts(run, args);
  if (warp == kPeerWarps) ok = lay_out_ranks(run, args, shared);
  if (!__syncthreads_and(ok)) return;
  signal_counts_ready(comm);
  if (args.ticket != 0) publish_totals(args, shared);
  signal_consumed(run, kConsumedCounts);
  advance(run);
}

__global__ void __launch_bounds__(kNotifyThreads, 1) ep_notify(const __grid_constant__ NotifyArgs args) {
  __shared__ Shared shared;
  const Run run = enter(args.comm, kNotify);
  // This does not depend on plan, so it comes before the wait for plan.
  bool is_free = true;
  if (run.ok && blockIdx.x == 0 && warp_id() < kPeerWarps) {
    peer::prefetch(args.comm.control, args.comm.num_ranks);
    for (int peer = warp_id(); is_free && peer < args.comm.num_ranks; peer += kPeerWarps)
      is_free = row_is_free(run, peer);
  }
  ptx::wait_on_dependency();
  if (!run.ok) return;
  // Only CTA 0 launches dependents early. So the send's CTAs start when the other CTAs have ended, and get their SMs.
  // Beside them, they would get other SMs, from which rows take up to a tenth longer: SMs are not equally far from the
  // links.
  if (blockIdx.x == 0) {
    ptx::launch_dependents();
    return exchange(args, run, is_free, shared);
  }
  assign_positions(args.comm, args.routing, args.block_counts, static_cast<int>(blockIdx.x) - 1);
  signal_positions_ready(args.comm);
}

// The part that waits for no peer, by itself.
__global__ void __launch_bounds__(kNotifyThreads, 1) ep_positions(const __grid_constant__ PlanArgs args) {
  const Run run = enter(args.comm, kPlan);
  if (!run.ok) return;
  assign_positions(args.comm, args.routing, args.block_counts, static_cast<int>(blockIdx.x));
  if (blockIdx.x + 1 != gridDim.x) return;
  // The running counts of the last block are those of all tokens.
  __syncthreads();
  const int32_t* known = meta_of(args.comm, args.routing).rank_count;  // expert_count follows it
  for (int i = threadIdx.x; i < num_keys(args.comm); i += blockDim.x)
    if (known[i] != counts[i]) fail(args.comm, kBadCounts, kPlan, args.comm.rank, i, known[i], counts[i]);
}

}  // namespace

void positions(const PlanArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  require_rows("block_counts", args.block_counts);
  const int64_t words = plan_block_words(args.comm.num_ranks, args.comm.num_experts);
  launch<ep_positions>("positions", plan_blocks(args.routing.num_tokens), kNotifyThreads, 4 * words, args.stream, args);
}

void notify(const NotifyArgs& args) {
  require_comm(args.comm);
  require_routing(args.routing);
  if (args.origins.messages == 0) require_rows("block_counts", args.block_counts);
  const int64_t words = shared_words(args.comm.num_ranks, args.comm.num_experts);
  if (args.origins.messages != 0)  // it may follow another notify, and reads the epoch that this one advances
    return launch<ep_notify>("notify", 1, kNotifyThreads, 4 * words, args.stream, args);
  const int64_t ctas = 1 + static_cast<int64_t>(plan_blocks(args.routing.num_tokens));
  launch_early<ep_notify>("notify", ctas, kNotifyThreads, 4 * words, args.stream, args);
}

}  // namespace ep::cuda
