// What the kernels of a dispatch over several nodes share: messages of counts, origins of tokens, and the order of the
// output's rows.
#pragma once
#include "common/views.h"

namespace ep {

EP_HD int num_nodes_of(const Comm& comm, const Nodes& nodes) { return nodes.num_ranks / comm.num_ranks; }
EP_HD MessageLayout message_layout(const Comm& comm, const Nodes& nodes) {
  return MessageLayout(nodes.num_chunks, comm.num_ranks, comm.num_experts);
}
// The node that is the origin `origin`, and the origin that a node is.
EP_HD int node_of_origin(const Comm& comm, const Nodes& nodes, int origin) {
  const int num_nodes = num_nodes_of(comm, nodes);
  return (nodes.node + num_nodes - 1 - origin) % num_nodes;
}
EP_HD int origin_of_node(const Comm& comm, const Nodes& nodes, int node) { return node_of_origin(comm, nodes, node); }

// --- Plan and notify -----------------------------------------------------------------------------------------------

// The tokens of one origin.
struct OriginCounts {
  int64_t tokens;        // with those that pad them, without those that were left out
  int64_t real_tokens;   // without those that pad them
  const int64_t* parts;  // [R + E]: tokens for each rank, then pairs for each expert
};
EP_HD OriginCounts counts_of(const Comm& comm, const Nodes& nodes, const Origins& origins, int origin) {
  const MessageLayout lay = message_layout(comm, nodes);
  const int64_t* message = at<const int64_t>(origins.messages) + node_of_origin(comm, nodes, origin) * lay.words();
  const int64_t tokens = message[lay.tokens(origins.chunk)], padded = origins.padded;
  const bool is_short = padded > 0 && padded < tokens;
  return OriginCounts{padded > 0 ? padded : tokens, is_short ? padded : tokens, message + lay.parts(origins.chunk)};
}

// What the rank with this rank's number on `node` has left out, as its message says.
EP_HD const int64_t* rail_overflow_of(const Comm& comm, const Nodes& nodes, const Origins& origins, int node) {
  const MessageLayout lay = message_layout(comm, nodes);
  return at<const int64_t>(origins.messages) + node * lay.words() + lay.rail_overflow();
}

EP_HD int num_experts_of(const PlanArgs& args) {
  return args.nodes.rank_place != 0 ? args.nodes.num_experts : args.comm.num_experts;
}
// This node's number of a valid expert; -1: it is on another node.
EP_HD int on_this_node(const PlanArgs& args, int expert) {
  const Nodes& nodes = args.nodes;
  if (nodes.rank_place == 0) return expert;
  const int per_rank = nodes.num_experts / nodes.num_ranks, ranks = args.comm.num_ranks;
  const int place = at<const int32_t>(nodes.rank_place)[expert / per_rank];
  return place / ranks == nodes.node ? place % ranks * per_rank + expert % per_rank : -1;
}
// Whether it is the first kernel after the messages of other nodes, and measures how long they took.
EP_HD bool follows_messages(const PlanArgs& args) { return args.nodes.waits != 0 && args.origins.messages == 0; }
// Whether the token only pads the tokens of its origin. Then its ids mean nothing.
EP_HD bool is_padding(const PlanArgs& args, int token) {
  const Origins& origins = args.origins;
  if (origins.messages == 0 || origins.padded == 0) return false;
  return token % origins.padded >= counts_of(args.comm, args.nodes, origins, token / origins.padded).real_tokens;
}

// --- Layout --------------------------------------------------------------------------------------------------------

EP_HD int num_chunks_of(const LayoutArgs& args) { return args.nodes.num_chunks > 1 ? args.nodes.num_chunks : 1; }
EP_HD int chunk_begin(int num_tokens, int chunk, int chunks) {
  return static_cast<int>(int64_t{num_tokens} * chunk / chunks);
}
EP_HD int node_of_rank(const LayoutArgs& args, int rank) {
  return at<const int32_t>(args.nodes.rank_place)[rank] / (args.nodes.num_ranks / args.num_nodes);
}

// Where layout writes its counts. They are numbered: ranks, then nodes, then experts.
class CountPlaces {
 public:
  EP_HD explicit CountPlaces(const LayoutArgs& args)
      : args_(args),
        ranks_(args.num_nodes > 0 ? args.nodes.num_ranks / args.num_nodes : args.nodes.num_ranks),
        per_rank_(args.nodes.num_experts / args.nodes.num_ranks),
        lay_(num_chunks_of(args), ranks_, ranks_ * per_rank_) {}

  EP_HD int64_t* message(int node) const { return at<int64_t>(args_.messages) + node * lay_.words(); }
  // This rank's own message among those that it receives.
  EP_HD int64_t* received_from_here() const { return message(args_.num_nodes + args_.nodes.node); }
  EP_HD int64_t tokens(int chunk, int node) const { return message(node)[lay_.tokens(chunk)]; }
  EP_HD int64_t* parts(int chunk, int node) const { return message(node) + lay_.parts(chunk); }
  EP_HD int64_t* rail_overflow(int64_t* message) const { return message + lay_.rail_overflow(); }
  EP_HD int64_t& waited(int64_t* message) const { return message[lay_.waited()]; }
  EP_HD void write(int chunk, int number, int32_t count) const {
    if (args_.messages == 0) {
      at<int32_t>(args_.counts)[number] = count;
      return;
    }
    const int node = number - args_.nodes.num_ranks, expert = node - args_.num_nodes;
    if (node >= 0 && expert < 0) {
      message(node)[lay_.tokens(chunk)] = count;
      return;
    }
    const int place = at<const int32_t>(args_.nodes.rank_place)[expert < 0 ? number : expert / per_rank_];
    const int rank = place % ranks_, key = expert < 0 ? rank : ranks_ + rank * per_rank_ + expert % per_rank_;
    message(place / ranks_)[lay_.parts(chunk) + key] = count;
  }

 private:
  const LayoutArgs& args_;
  const int ranks_, per_rank_;  // of a node, and experts of a rank
  const MessageLayout lay_;
};

// Adds up what is left out of one chunk's tokens for one node.
EP_HD void add_left_out(const LayoutArgs& args, int64_t tokens, int64_t* rail_overflow) {
  const int64_t most = tokens * num_chunks_of(args);
  if (args.padded > 0 && tokens > args.padded) rail_overflow[kLeftOut] += tokens - args.padded;
  if (args.padded > 0 && most > rail_overflow[kMostRows]) rail_overflow[kMostRows] = most;
}

// How long this rank has waited in the dispatch before.
EP_HD int64_t waited_before(const Nodes& nodes) {
  return nodes.waits == 0 ? 0 : at<const int64_t>(nodes.waits)[kWaited];
}

// --- Place ---------------------------------------------------------------------------------------------------------

// The legs of the chunks, in the order of their rows in the rail's buffers: legs of one chunk go to the nodes node + 1,
// node + 2, ....
EP_HD int node_of_leg(const PlaceArgs& args, int leg) {
  const int num_nodes = num_nodes_of(args.comm, args.nodes);
  return (args.nodes.node + 1 + leg % (num_nodes - 1)) % num_nodes;
}
EP_HD int64_t rows_of_leg(const PlaceArgs& args, int leg) {
  if (args.padded > 0) return args.padded;
  const MessageLayout lay = message_layout(args.comm, args.nodes);
  const int64_t* message = at<const int64_t>(args.messages) + node_of_leg(args, leg) * lay.words();
  return message[lay.tokens(leg / (num_nodes_of(args.comm, args.nodes) - 1))];
}

EP_HD Meta segment_meta(const PlaceArgs& args, int segment) {
  const MetaLayout lay = meta_layout(args.comm.num_ranks, args.comm.num_experts, args.comm.num_origins);
  return meta_at(args.comm, args.metas + 4 * segment * lay.words);
}

// How long the rank with this rank's number on `node` waited in the dispatch before, as its message says.
EP_HD int64_t waited_of(const PlaceArgs& args, int node) {
  const MessageLayout lay = message_layout(args.comm, args.nodes);
  const int num_nodes = num_nodes_of(args.comm, args.nodes);
  return at<const int64_t>(args.messages)[(num_nodes + node) * lay.words() + lay.waited()];
}

// The rows of one origin of a source in one segment. They are contiguous in the output.
struct OutputSource {
  Meta meta;
  int64_t place;  // of the source and the origin in the tables by [R][O]

  // Rows of one kind: local -1: slots; else pairs for that local expert.
  EP_HD int32_t rows(const Comm& comm, int local) const {
    if (local >= 0) return meta.origin_rows[place * local_experts(comm) + local];
    return meta.origin_end[place] - (place % comm.num_origins == 0 ? 0 : meta.origin_end[place - 1]);
  }
  EP_HD int32_t& base(const Comm& comm, int local) const {
    return local < 0 ? meta.token_base[place] : meta.flat_base[place * local_experts(comm) + local];
  }
};

// All sources of a dispatch in the order of their rows: by rank, then by chunk. The ranks of this node have their rows
// in segment 0; the other chunks of theirs do not exist.
EP_HD int num_output_sources(const PlaceArgs& args) { return args.nodes.num_ranks * args.nodes.num_chunks; }
EP_HD bool output_source(const PlaceArgs& args, int number, OutputSource* source) {
  const Comm& comm = args.comm;
  const int chunk = number % args.nodes.num_chunks;
  const int place = at<const int32_t>(args.nodes.rank_place)[number / args.nodes.num_chunks];
  const int node = place / comm.num_ranks, rank = place % comm.num_ranks;
  const bool is_here = node == args.nodes.node;
  const int origin = is_here ? 0 : origin_of_node(comm, args.nodes, node);
  *source = OutputSource{segment_meta(args, is_here ? 0 : 1 + chunk), int64_t{rank} * comm.num_origins + origin};
  return !is_here || chunk == 0;
}

// Sets the bases of a source's origins in one segment, as if its first row were row 0: a base is relative to the
// source's position among all its rows, and the rows of its other origins are elsewhere.
EP_HD void begin_bases(const PlaceArgs& args, int segment, int rank, int local) {
  const Comm& comm = args.comm;
  const Meta meta = segment_meta(args, segment);
  int32_t earlier = 0;
  for (int origin = 0; origin < comm.num_origins; ++origin) {
    const OutputSource source{meta, int64_t{rank} * comm.num_origins + origin};
    source.base(comm, local) = -earlier;
    earlier += source.rows(comm, local);
  }
}

}  // namespace ep
