// Plan: computes where each of this rank's tokens goes, in one pass over topk_ids in token order. Positions are running
// counts of the tokens for a rank, and of the pairs for an expert.
#include <vector>

#include "common/nodes.h"
#include "cpu/core/sync.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {
// The pair's expert on this node, or -1.
int32_t read_expert(const PlanArgs& args, int token, int64_t pair) {
  const int64_t id = args.id_bytes == 8 ? at<const int64_t>(args.ids)[pair] : at<const int32_t>(args.ids)[pair];
  if (id >= 0 && id < num_experts_of(args)) return on_this_node(args, static_cast<int>(id));
  if (id != -1) fail(args.comm, kBadIds, kPlan, args.comm.rank, token, num_experts_of(args), id);
  return -1;
}
}  // namespace

void plan(const PlanArgs& args) {
  const Comm& comm = args.comm;
  Run run{comm, kPlan, 0};
  if (!begin(comm, kPlan, &run)) return;
  if (follows_messages(args)) {
    int64_t* waits = at<int64_t>(args.nodes.waits);
    waits[kWaited] = now_ns() - waits[kMessagesWritten];
  }
  if (!hold_at_gate(run)) return;
  const int R = comm.num_ranks, E = comm.num_experts, K = args.routing.topk, T = args.routing.num_tokens;
  const int per_rank = local_experts(comm);
  const Chunks chunks = chunks_of(T);
  const Meta meta = meta_of(comm, args.routing);
  int32_t* ids = at<int32_t>(args.routing.topk_ids);
  int32_t* send_pos = at<int32_t>(args.routing.send_pos);
  int32_t* pair_pos = at<int32_t>(args.routing.pair_pos);
  std::vector<int32_t> counts(R + E, 0);
  int32_t *rank_count = counts.data(), *expert_count = rank_count + R;
  for (int t = 0; t < T; ++t) {
    int32_t* to = send_pos + static_cast<int64_t>(t) * R;
    for (int r = 0; r < R; ++r) to[r] = -1;
    const bool is_real = !is_padding(args, t);
    for (int k = 0; k < K; ++k) {
      const int64_t pair = static_cast<int64_t>(t) * K + k;
      const int32_t id = is_real ? read_expert(args, t, pair) : -1;
      ids[pair] = id;
      pair_pos[pair] = id < 0 ? -1 : expert_count[id]++;
      if (id < 0) continue;
      const int r = id / per_rank;
      if (to[r] < 0) to[r] = rank_count[r]++;
    }
    const int chunk = chunks.of(t);
    if (t + 1 == chunks.end(chunk))
      for (int r = 0; r < R; ++r) meta.send_chunk_end[r * kMaxChunks + chunk] = rank_count[r];
  }
  for (int i = 0; i < R + E; ++i) {  // expert_count follows rank_count
    if (args.origins.messages != 0 && meta.rank_count[i] != counts[i])
      fail(comm, kBadCounts, kPlan, comm.rank, i, meta.rank_count[i], counts[i]);
    meta.rank_count[i] = counts[i];
  }
  finish(run);
}

void positions(const PlanArgs&) {}  // plan has written them

}  // namespace ep::cpu
