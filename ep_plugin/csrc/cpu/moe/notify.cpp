// Notify: the ranks exchange counts, and each computes where the rows that it receives go.
//
// A rank writes one count row (common/layout.h) to every rank, waits for one from every rank, and checks it. Each word
// of a count row carries its epoch, so no flag is needed. There are two rows for each pair of ranks, used in turn. A
// row is overwritten after its reader's consumed word has reached epoch - 2.
#include <algorithm>
#include <vector>

#include "common/nodes.h"
#include "cpu/core/sync.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

// Received counts, checked: [R, R + E_l]. For each source: rows for each rank, then pairs for each local expert.
using Counts = std::vector<int32_t>;

int keys_of(const Comm& comm) { return comm.num_ranks + local_experts(comm); }

// Adds up the counts of the origins, as this rank's counts. Returns the sum of their tokens.
int64_t add_origins(const NotifyArgs& args, const Meta& meta) {
  const int keys = args.comm.num_ranks + args.comm.num_experts;
  int64_t tokens = 0;
  std::fill_n(meta.rank_count, keys, 0);  // expert_count follows it
  for (int origin = 0; origin < args.comm.num_origins; ++origin) {
    const OriginCounts counts = counts_of(args.comm, args.nodes, args.origins, origin);
    tokens += counts.tokens;
    // The counts came from other nodes. A sum that wraps is refused by those who receive it, like any wrong count.
    for (int i = 0; i < keys; ++i)
      meta.rank_count[i] = static_cast<int32_t>(static_cast<uint32_t>(meta.rank_count[i]) + counts.parts[i]);
  }
  return tokens;
}

// Adds up what ranks have left out. The sum stays within int32.
void add_rail_overflow(int64_t left_out, int64_t most_rows, int64_t* rail_overflow) {
  rail_overflow[kLeftOut] = std::min<int64_t>(rail_overflow[kLeftOut] + left_out, INT32_MAX);
  rail_overflow[kMostRows] = std::min<int64_t>(std::max(rail_overflow[kMostRows], most_rows), INT32_MAX);
}

// Writes what this rank and its peers on other nodes have left out, and the counts of each origin, to a count row.
void send_origins(const Run& run, const NotifyArgs& args, int peer, uint64_t* words) {
  const Comm& comm = run.comm;
  const int R = comm.num_ranks, per_rank = local_experts(comm);
  int64_t rail_overflow[kRailOverflowWords] = {};
  for (int node = 0; node < num_nodes_of(comm, args.nodes); ++node) {
    const int64_t* left_out = rail_overflow_of(comm, args.nodes, args.origins, node);
    add_rail_overflow(left_out[kLeftOut], left_out[kMostRows], rail_overflow);
  }
  for (const int64_t word : rail_overflow) signal(words++, tagged(run.epoch, static_cast<uint32_t>(word)));
  for (int origin = 0; origin < comm.num_origins; ++origin) {
    const int64_t* counts = counts_of(comm, args.nodes, args.origins, origin).parts;
    signal(words++, tagged(run.epoch, static_cast<uint32_t>(counts[peer])));
    for (int local = 0; local < per_rank; ++local)
      signal(words++, tagged(run.epoch, static_cast<uint32_t>(counts[R + peer * per_rank + local])));
  }
}

// Receives what send_origins() writes. The counts must add up to `rows` and `pairs`, the source's counts for this rank.
bool receive_origins(const Run& run, int source, const uint64_t* words, int32_t rows, const int32_t* pairs,
                     const Meta& meta, int64_t* rail_overflow) {
  const Comm& comm = run.comm;
  const int per_rank = local_experts(comm), O = comm.num_origins;
  int32_t* ends = meta.origin_end + static_cast<int64_t>(source) * O;
  int32_t* of_origins = meta.origin_rows + static_cast<int64_t>(source) * O * per_rank;
  std::vector<int64_t> sums(1 + per_rank);
  uint32_t left_out[kRailOverflowWords];
  for (uint32_t& word : left_out)
    if (!wait_tagged(run, words++, source, &word)) return false;
  add_rail_overflow(left_out[kLeftOut], left_out[kMostRows], rail_overflow);
  for (int origin = 0; origin < O; ++origin)
    for (int i = 0; i <= per_rank; ++i) {
      uint32_t count;
      if (!wait_tagged(run, words++, source, &count)) return false;
      const int64_t most = i == 0 ? rows : pairs[i - 1];
      sums[i] += count;
      if (sums[i] > most) return fail(comm, kBadData, kNotify, source, i, most, sums[i]);
      if (i == 0)
        ends[origin] = static_cast<int32_t>(sums[0]);
      else
        of_origins[origin * per_rank + i - 1] = static_cast<int32_t>(count);
    }
  for (int i = 0; i <= per_rank; ++i) {
    const int64_t whole = i == 0 ? rows : pairs[i - 1];
    if (sums[i] != whole) return fail(comm, kBadData, kNotify, source, i, whole, sums[i]);
  }
  return true;
}

// Gives all counts of a source to its first origin.
void set_one_origin(const Comm& comm, int source, int32_t rows, const int32_t* pairs, const Meta& meta) {
  const int64_t per_rank = local_experts(comm), O = comm.num_origins;
  int32_t* of_origins = meta.origin_rows + source * O * per_rank;
  std::fill_n(meta.origin_end + source * O, O, rows);
  std::fill_n(of_origins, O * per_rank, 0);
  std::copy_n(pairs, per_rank, of_origins);
}

bool send_counts(const Run& run, const NotifyArgs& args) {
  const Comm& comm = run.comm;
  const int R = comm.num_ranks, per_rank = local_experts(comm), parity = static_cast<int>(run.epoch & 1);
  const Meta meta = meta_of(comm, args.routing);
  for (int peer = 0; peer < R; ++peer) {
    const uint64_t free_at = run.epoch < 2 ? 0 : run.epoch - 2;  // two count rows, used in turn
    if (!wait_at_least(run, consumed_word(comm, comm.rank, kConsumedCounts, peer), free_at, peer)) return false;
  }
  if (!hold_at_gate(run)) return false;
  Header mine = args.header;
  if (args.origins.messages != 0) mine.num_tokens = add_origins(args, meta);
  const uint32_t* header = reinterpret_cast<const uint32_t*>(&mine);
  for (int peer = 0; peer < R; ++peer) {
    uint64_t* words = count_words(comm, peer, parity, comm.rank);
    const int32_t* pairs = meta.expert_count + peer * per_rank;
    for (int i = 0; i < kHeaderWords; ++i) signal(words++, tagged(run.epoch, header[i]));
    for (int dest = 0; dest < R; ++dest) signal(words++, tagged(run.epoch, meta.rank_count[dest]));
    for (int local = 0; local < per_rank; ++local) signal(words++, tagged(run.epoch, pairs[local]));
    if (has_origins(args)) send_origins(run, args, peer, words);
  }
  return true;
}

// Peers write count rows. No loop bound or index comes from them before this check.
bool check_counts(const Run& run, int source, int64_t tokens, const int32_t* counts) {
  const Comm& comm = run.comm;
  if (tokens < 0 || tokens > INT32_MAX) return fail(comm, kBadData, kNotify, source, 0, 0, tokens);
  for (int i = 0; i < keys_of(comm); ++i)
    if (counts[i] < 0 || counts[i] > tokens) return fail(comm, kBadData, kNotify, source, i, tokens, counts[i]);
  return true;
}

bool receive_counts(const Run& run, const NotifyArgs& args, Counts* counts) {
  const Comm& comm = run.comm;
  const Meta meta = meta_of(comm, args.routing);
  const int R = comm.num_ranks, keys = keys_of(comm);
  int64_t rail_overflow[kRailOverflowWords] = {};
  for (int source = 0; source < R; ++source) {
    const uint64_t* words = count_words(comm, comm.rank, static_cast<int>(run.epoch & 1), source);
    Header theirs{};
    int32_t* values = counts->data() + static_cast<int64_t>(source) * keys;
    for (int i = 0; i < kHeaderWords; ++i)
      if (!wait_tagged(run, words + i, source, reinterpret_cast<uint32_t*>(&theirs) + i)) return false;
    for (int i = 0; i < keys; ++i)
      if (!wait_tagged(run, words + kHeaderWords + i, source, reinterpret_cast<uint32_t*>(values) + i)) return false;
    const int field = header_mismatch(args.header, theirs);
    if (field >= 0) {
      const int64_t* ours = reinterpret_cast<const int64_t*>(&args.header);
      return fail(comm, kDisagree, kNotify, source, field, ours[field],
                  reinterpret_cast<const int64_t*>(&theirs)[field]);
    }
    if (!check_counts(run, source, theirs.num_tokens, values)) return false;
    meta.src_tokens[source] = static_cast<int32_t>(theirs.num_tokens);
    const int32_t rows = values[comm.rank], *pairs = values + R;
    if (!has_origins(args))
      set_one_origin(comm, source, rows, pairs, meta);
    else if (!receive_origins(run, source, words + kHeaderWords + keys, rows, pairs, meta, rail_overflow))
      return false;
  }
  std::copy_n(rail_overflow, kRailOverflowWords, meta.rail_overflow);
  return true;
}

// Computes the order of the slots that this rank receives, and the bases of partial rows. Row numbers are int32.
bool lay_out_ranks(const Run& run, const Meta& meta, const Counts& counts, int64_t* max_sent) {
  const Comm& comm = run.comm;
  const int R = comm.num_ranks, me = comm.rank, keys = keys_of(comm);
  auto count = [&](int source, int dest) { return counts[source * keys + dest]; };
  int64_t most = 0;
  *max_sent = 0;
  *meta.max_rows = 0;
  meta.recv_offset[0] = 0;
  for (int a = 0; a < R; ++a) {
    meta.recv_offset[a + 1] = meta.recv_offset[a] + count(a, me);
    std::fill_n(meta.token_base + static_cast<int64_t>(a) * comm.num_origins, comm.num_origins, meta.recv_offset[a]);
    meta.send_base[a] = meta.combine_base[a] = 0;
    for (int before = 0; before < a; ++before) meta.send_base[a] += count(me, before);
    for (int before = 0; before < me; ++before) meta.combine_base[a] += count(a, before);
    int64_t slots = 0, sent = 0;
    for (int b = 0; b < R; ++b) {
      slots += count(b, a);
      meta.rank_prefix[b * R + a] = static_cast<int32_t>(slots);
      sent += count(a, b);
      *meta.max_rows = std::max(*meta.max_rows, count(a, b));
    }
    *max_sent = std::max(*max_sent, sent);
    most = std::max({most, slots, sent});
  }
  *meta.token_rows = meta.recv_offset[R];
  return most <= INT32_MAX || fail(comm, kTooSmall, kNotify, me, 0, INT32_MAX, most);
}

// Computes where each local expert's FLAT rows start, and where each source's rows start among them.
bool lay_out_experts(const Run& run, const Meta& meta, const Counts& counts, int alignment) {
  const Comm& comm = run.comm;
  const int R = comm.num_ranks, per_rank = local_experts(comm), keys = keys_of(comm);
  int64_t offset = 0;
  for (int local = 0; local < per_rank; ++local) {
    int64_t rows = 0;
    for (int source = 0; source < R; ++source) {
      for (int64_t origin = 0; origin < comm.num_origins; ++origin)
        meta.flat_base[(source * comm.num_origins + origin) * per_rank + local] = static_cast<int32_t>(offset + rows);
      rows += counts[source * keys + R + local];
    }
    meta.expert_offset[local] = static_cast<int32_t>(offset);
    meta.expert_rows[local] = static_cast<int32_t>(rows);
    offset += align_up(rows, alignment);
  }
  meta.expert_offset[per_rank] = static_cast<int32_t>(offset);
  return offset <= INT32_MAX || fail(comm, kTooSmall, kNotify, comm.rank, 1, INT32_MAX, offset);
}

void publish_totals(const NotifyArgs& args, const Meta& meta, int64_t max_sent) {
  const Comm& comm = args.comm;
  const int per_rank = local_experts(comm);
  int64_t* totals = board_totals(comm, args.segment);
  totals[kTotalSlots] = meta.recv_offset[comm.num_ranks];
  totals[kTotalRows] = meta.expert_offset[per_rank];
  totals[kTotalMaxRows] = *meta.max_rows;
  totals[kTotalMaxSent] = max_sent;
  for (int local = 0; local < per_rank; ++local) totals[kTotals + local] = meta.expert_rows[local];
  signal(&board_of(comm).ticket, args.ticket);
}

}  // namespace

void notify(const NotifyArgs& args) {
  const Comm& comm = args.comm;
  Run run{comm, kNotify, 0};
  if (!begin(comm, kNotify, &run)) return;
  Counts counts(static_cast<size_t>(comm.num_ranks) * keys_of(comm));
  if (!send_counts(run, args) || !receive_counts(run, args, &counts)) return;
  const Meta meta = meta_of(comm, args.routing);
  int64_t max_sent;
  if (!lay_out_ranks(run, meta, counts, &max_sent)) return;
  if (!lay_out_experts(run, meta, counts, args.routing.layout == kFlat ? args.routing.alignment : 1)) return;
  for (int peer = 0; peer < comm.num_ranks; ++peer)
    signal(consumed_word(comm, peer, kConsumedCounts, comm.rank), run.epoch);
  finish(run);
  if (args.ticket != 0) publish_totals(args, meta, max_sent);
}

}  // namespace ep::cpu
