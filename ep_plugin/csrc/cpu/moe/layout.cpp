// Layout: counts the tokens of each rank, node and expert, in one pass over the ids in token order.
#include <cstring>
#include <vector>

#include "common/views.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {
int64_t load_id(const LayoutArgs& args, int64_t pair) {
  return args.id_bytes == 8 ? at<const int64_t>(args.ids)[pair] : at<const int32_t>(args.ids)[pair];
}
}  // namespace

void layout(const LayoutArgs& args) {
  const int R = args.num_ranks, N = args.num_nodes, E = args.num_experts, K = args.topk;
  const int per_rank = E / R;
  int32_t* counts = at<int32_t>(args.counts);
  std::memset(counts, 0, sizeof(int32_t) * (R + N + E));
  std::vector<int32_t> counted(R + N + E, -1);  // by count: the last token in it
  for (int t = 0; t < args.num_tokens; ++t) {
    const auto count = [&](int of) {
      if (counted[of] != t) ++counts[of];
      counted[of] = t;
    };
    bool* in_rank = args.in_rank == 0 ? nullptr : at<bool>(args.in_rank) + static_cast<int64_t>(t) * R;
    if (in_rank != nullptr) std::memset(in_rank, 0, R);
    for (int k = 0; k < K; ++k) {
      const int64_t id = load_id(args, static_cast<int64_t>(t) * K + k);
      if (id < 0 || id >= E) continue;
      const int expert = static_cast<int>(id), rank = expert / per_rank;
      if (in_rank != nullptr) in_rank[rank] = true;
      count(rank);
      if (N > 0) count(R + at<const int32_t>(args.rank_node)[rank]);
      count(R + N + expert);
    }
  }
}

}  // namespace ep::cpu
