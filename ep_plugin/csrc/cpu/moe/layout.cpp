// Layout: counts the tokens of each rank, node and expert, in one pass over the ids in token order.
#include <cstring>
#include <vector>

#include "common/nodes.h"
#include "cpu/core/sync.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

int64_t load_id(const LayoutArgs& args, int64_t pair) {
  return args.id_bytes == 8 ? at<const int64_t>(args.ids)[pair] : at<const int32_t>(args.ids)[pair];
}

// Counts the tokens of one chunk. First it counts a token for its nodes: one that is left out for a node does not count
// for the node's ranks and experts.
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
    const auto expert_of = [&](int k) {
      const int64_t id = load_id(args_, int64_t{token} * args_.topk + k);
      return id >= 0 && id < E ? static_cast<int>(id) : -1;
    };
    for (int k = 0; N > 0 && k < args_.topk; ++k)
      if (const int expert = expert_of(k); expert >= 0) add(token, R + node_of_rank(args_, expert / (E / R)));
    for (int k = 0; k < args_.topk; ++k) {
      const int expert = expert_of(k), rank = expert / (E / R);
      if (args_.messages != 0) at<int32_t>(args_.own_ids)[int64_t{token} * args_.topk + k] = expert;
      if (expert < 0 || is_left_out(node_of(rank))) continue;
      if (in_rank != nullptr) in_rank[rank] = true;
      add(token, rank);
      add(token, R + N + expert);
    }
    if (args_.messages == 0) return;
    int32_t* rows = at<int32_t>(args_.rail_rows) + int64_t{token} * N;
    for (int node = 0; node < N; ++node) {
      const bool goes = node != args_.nodes.node && counted_[R + node] == token && !is_left_out(node);
      rows[node] = goes ? counts_[R + node] - 1 : -1;
    }
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
  int node_of(int rank) const { return args_.num_nodes > 0 ? node_of_rank(args_, rank) : -1; }
  // Whether the latest token for a node is left out.
  bool is_left_out(int node) const {
    return args_.padded > 0 && node >= 0 && node != args_.nodes.node &&
           counts_[args_.nodes.num_ranks + node] > args_.padded;
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
  int64_t rail_overflow[kRailOverflowWords] = {};
  for (int node = 0; node < args.num_nodes; ++node)
    for (int chunk = 0; node != args.nodes.node && chunk < chunks; ++chunk)
      add_left_out(args, places.tokens(chunk, node), rail_overflow);
  for (int node = 0; node < args.num_nodes; ++node) {
    std::memcpy(places.message(node), &args.header, sizeof(Header));
    std::memcpy(places.rail_overflow(places.message(node)), rail_overflow, sizeof rail_overflow);
    places.waited(places.message(node)) = waited_before(args.nodes);
  }
  std::memcpy(places.rail_overflow(places.received_from_here()), rail_overflow, sizeof rail_overflow);
  places.waited(places.received_from_here()) = waited_before(args.nodes);
  if (args.nodes.waits != 0) at<int64_t>(args.nodes.waits)[kMessagesWritten] = now_ns();
}

}  // namespace ep::cpu
