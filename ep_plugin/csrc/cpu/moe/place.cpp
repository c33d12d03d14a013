// Place: gives the rows of a dispatch over several nodes their places in the rail's buffers and in the output.
#include <algorithm>
#include <vector>

#include "common/nodes.h"
#include "cpu/core/sync.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

// Turns the number of each token among those of its chunk for a node into its row in the rail's buffers.
void place_sent(const PlaceArgs& args) {
  const int N = num_nodes_of(args.comm, args.nodes), C = args.nodes.num_chunks, T = args.num_tokens;
  std::vector<int64_t> begins(static_cast<size_t>(C) * N);
  int64_t begin = 0;
  for (int leg = 0; leg < C * (N - 1); ++leg) {
    begins[leg / (N - 1) * N + node_of_leg(args, leg)] = begin;
    begin += rows_of_leg(args, leg);
  }
  int32_t* row = at<int32_t>(args.rail_rows);
  for (int chunk = 0; chunk < C; ++chunk)
    for (int token = chunk_begin(T, chunk, C); token < chunk_begin(T, chunk + 1, C); ++token)
      for (int node = 0; node < N; ++node, ++row)
        if (*row >= 0) *row += static_cast<int32_t>(begins[chunk * N + node]);
}

// Writes where the rows of one kind begin in the output: from `start` on. Returns their number.
int64_t place_received(const PlaceArgs& args, int local, int64_t start) {
  for (int segment = 0; segment <= args.nodes.num_chunks; ++segment)
    for (int rank = 0; rank < args.comm.num_ranks; ++rank) begin_bases(args, segment, rank, local);
  int64_t rows = 0;
  for (int number = 0; number < num_output_sources(args); ++number) {
    OutputSource source;
    if (!output_source(args, number, &source)) continue;
    source.base(args.comm, local) += static_cast<int32_t>(start + rows);
    rows += source.rows(args.comm, local);
  }
  return rows;
}

// Counts what this rank has waited longer than the rank of its rail that came last.
void count_wait(const PlaceArgs& args) {
  int last = 0;
  for (int node = 1; node < num_nodes_of(args.comm, args.nodes); ++node)
    if (waited_of(args, node) < waited_of(args, last)) last = node;
  at<int64_t>(args.nodes.waits)[kWaitedFor + last] += waited_of(args, args.nodes.node) - waited_of(args, last);
}

}  // namespace

void place(const PlaceArgs& args) {
  Run run{args.comm, kPlan, 0};
  if (!begin(args.comm, kPlan, &run)) return;
  place_sent(args);
  if (args.nodes.waits != 0) count_wait(args);
  const int num_segments = args.nodes.num_chunks + 1, per_rank = local_experts(args.comm);
  const int64_t slots = place_received(args, -1, 0);
  int64_t start = 0;
  for (int local = 0; local < per_rank; ++local) {
    const int64_t rows = place_received(args, local, start);
    for (int segment = 0; segment < num_segments; ++segment) {
      const Meta meta = segment_meta(args, segment);
      meta.expert_offset[local] = static_cast<int32_t>(start);
      meta.expert_rows[local] = static_cast<int32_t>(rows);
    }
    start += align_up(rows, args.alignment);
  }
  for (int segment = 0; segment < num_segments; ++segment) {
    const Meta meta = segment_meta(args, segment);
    std::copy_n(segment_meta(args, 1).rail_overflow, kRailOverflowWords, meta.rail_overflow);
    meta.expert_offset[per_rank] = static_cast<int32_t>(start);
    *meta.token_rows = static_cast<int32_t>(slots);
  }
  if (start > INT32_MAX) fail(args.comm, kTooSmall, kPlan, args.comm.rank, 1, INT32_MAX, start);
}

}  // namespace ep::cpu
