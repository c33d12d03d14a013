// Layout: counts the tokens of each rank, node and expert, in one pass over the ids in token order.
#include <cstring>
#include <vector>

#include "common/nodes.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

int64_t load_id(const LayoutArgs& args, int64_t pair) {
  return args.id_bytes == 8 ? at<const int64_t>(args.ids)[pair] : at<const int32_t>(args.ids)[pair];
}

// Counts the tokens of one chunk.
class Counts {
 public:
  explicit Counts(const LayoutArgs& args)
      : args_(args),
        counts_(args.nodes.num_ranks + args.num_nodes + args.nodes.num_experts),
        counted_(counts_.size(), -1) {}

  void count(int token) {
    const int R = args_.nodes.num_ranks, N = args_.num_nodes, E = args_.nodes.num_experts;
    bool* in_rank = args_.in_rank == 0 ? nullptr : at<bool>(args_.in_rank) + int64_t{token} * R;
    if (in_rank != nullptr) std::memset(in_rank, 0, R);
    for (int k = 0; k < args_.topk; ++k) {
      const int64_t pair = int64_t{token} * args_.topk + k, id = load_id(args_, pair);
      const bool is_expert = id >= 0 && id < E;
      if (args_.messages != 0) at<int32_t>(args_.own_ids)[pair] = is_expert ? static_cast<int32_t>(id) : -1;
      if (!is_expert) continue;
      const int expert = static_cast<int>(id), rank = expert / (E / R);
      if (in_rank != nullptr) in_rank[rank] = true;
      add(token, rank);
      if (N > 0) add(token, R + node_of_rank(args_, rank));
      add(token, R + N + expert);
    }
    if (args_.messages == 0) return;
    int32_t* rows = at<int32_t>(args_.rail_rows) + int64_t{token} * N;
    for (int node = 0; node < N; ++node)
      rows[node] = node != args_.nodes.node && counted_[R + node] == token ? counts_[R + node] - 1 : -1;
  }
  void write(int chunk) const {
    const CountPlaces places(args_);
    for (size_t number = 0; number < counts_.size(); ++number)
      places.write(chunk, static_cast<int>(number), counts_[number]);
  }

 private:
  void add(int token, int number) {
    if (counted_[number] != token) ++counts_[number];
    counted_[number] = token;
  }

  const LayoutArgs& args_;
  std::vector<int32_t> counts_;
  std::vector<int32_t> counted_;  // by count: the last token in it
};

}  // namespace

void layout(const LayoutArgs& args) {
  const int T = args.num_tokens, chunks = num_chunks_of(args);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    Counts counts(args);
    const int end = chunk_begin(T, chunk + 1, chunks);
    for (int token = chunk_begin(T, chunk, chunks); token < end; ++token) counts.count(token);
    counts.write(chunk);
  }
  if (args.messages == 0) return;
  const CountPlaces places(args);
  for (int node = 0; node < args.num_nodes; ++node) std::memcpy(places.message(node), &args.header, sizeof(Header));
}

}  // namespace ep::cpu
