// Low-latency dispatch: rows go to the fixed slots of their tokens; the receiver computes counts and places from the
// sources' expert ids. common/low_latency.h has the layout and the rules.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/core/quantize.h"
#include "cpu/moe/kernels.h"
#include "cpu/moe/ll_legs.h"

namespace ep::cpu {

namespace {

constexpr int16_t kDropped = -1;

// -- send ----------------------------------------------------------------------------------------------------------

// Reads the caller's ids as they travel, and writes the handle's copy.
bool read_ids(const LlRun& ll, const LlDispatchArgs& args, std::vector<int16_t>* ids) {
  const Comm& comm = ll.op.comm;
  const int K = ll.op.header.topk, experts = comm.num_experts * ll.op.shape.num_nodes;
  const int64_t pairs = static_cast<int64_t>(ll.op.header.num_tokens) * K;
  ids->resize(pairs);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t id = args.id_bytes == 8 ? at<int64_t>(args.ids)[pair] : at<int32_t>(args.ids)[pair];
    if (id < -1 || id >= experts)
      return fail(comm, kBadIds, ll.run.step, comm.rank, static_cast<int>(pair / K), experts, id);
    (*ids)[pair] = static_cast<int16_t>(id);
    if (args.topk_ids != 0) at<int32_t>(args.topk_ids)[pair] = static_cast<int32_t>(id);
  }
  return true;
}

// Makes the images [row | scales] of tokens, and quantises rows if the format needs it. The next call overwrites the
// image.
class Images {
 public:
  explicit Images(const LlDispatchArgs& args)
      : args_(args), bytes_(ll_image_bytes(args.op.header.row_bytes, args.op.header.scale_bytes)) {
    const LlHeader& header = args.op.header;
    if (header.format == kLlPlain) return;
    require_quantizable(args.element);
    scales_.resize(quantized_scale_bytes(header.row_bytes) / kScaleBytes);
    image_.resize(bytes_);
  }

  int64_t bytes() const { return bytes_; }

  const char* of(int token) {
    const LlHeader& header = args_.op.header;
    const char* row = at<char>(args_.x, token * args_.x_stride);
    if (header.format == kLlPlain) return row;
    with_element(args_.element, [&](auto element) {
      quantize_row(reinterpret_cast<const decltype(element)*>(row), header.row_bytes,
                   reinterpret_cast<uint8_t*>(image_.data()), scales_.data(), header.format != kLlE4m3);
    });
    char* scales = image_.data() + ll_scales_offset(header.row_bytes);
    if (header.format == kLlE4m3Ue8m0)
      std::transform(scales_.begin(), scales_.end(), reinterpret_cast<uint8_t*>(scales), ue8m0_of);
    else
      std::memcpy(scales, scales_.data(), header.scale_bytes);
    return image_.data();
  }

 private:
  const LlDispatchArgs& args_;
  const int64_t bytes_;
  std::vector<char> image_;  // bytes after exponents stay zeros
  std::vector<float> scales_;
};

bool goes_to(const LlRun& ll, const int16_t* ids, int rank) {
  const int per_rank = local_experts(ll.op.comm), K = ll.op.header.topk;
  return std::any_of(ids, ids + K, [&](int16_t id) { return id >= 0 && id / per_rank == rank; });
}

// Sends the header and all ids to one peer, after the peer has read the earlier words there.
Wait send_words(const LlRun& ll, const std::vector<int16_t>& ids, int peer) {
  const Wait found = ll_wait_consumed(ll, peer);
  if (found != Wait::kThere) return found;
  const LlHeader header = ll_own_header(ll);
  const LlBlock to = ll.block(peer);
  LlWord* words = to.ids(ll.parity, ll.op.comm.rank);
  ll_write_words(ll, words, &header, sizeof(header));
  const int64_t bytes = static_cast<int64_t>(ids.size()) * 2;
  if (bytes != 0) ll_write_words(ll, words + kLlHeaderWords, ids.data(), bytes);
  ll_refresh(ll, words, to.lay.id_words, [&](int64_t index) { return index < kLlHeaderWords + ll_words(bytes); });
  return Wait::kThere;
}

void send_group(const LlRun& ll, const std::vector<int16_t>& ids, Images& images, LlRowLegs& legs, int group) {
  const Comm& comm = ll.op.comm;
  const int R = comm.num_ranks, T = ll.op.header.num_tokens, K = ll.op.header.topk;
  const int begin = group * ll_group_tokens(T), end = std::min(T, begin + ll_group_tokens(T));
  bool sent[kMaxRanks] = {};
  for (int token = begin; token < end; ++token) {
    const char* made = nullptr;
    const auto image = [&] { return made = made == nullptr ? images.of(token) : made; };
    for (int step = 1; step <= R; ++step) {
      const int peer = (comm.rank + step) % R;
      if (ll.masked(peer) || !goes_to(ll, ids.data() + static_cast<int64_t>(token) * K, peer)) continue;
      const LlBlock to = ll.block(peer);
      std::memcpy(to.slot(ll.kind, ll.parity, comm.rank, token), image(), images.bytes());
      sent[peer] = true;
    }
    legs.add(token, image);
  }
  for (int peer = 0; peer < R; ++peer)
    if (sent[peer]) signal(ll.block(peer).flag(ll.kind, ll.parity, comm.rank, group), ll.run.epoch);
}

bool send_all(const LlRun& ll, const LlDispatchArgs& args) {
  const Comm& comm = ll.op.comm;
  std::vector<int16_t> all_ids;
  if (!read_ids(ll, args, &all_ids)) return false;
  const LlExperts experts(ll, std::move(all_ids));
  const std::vector<int16_t>& ids = experts.here();
  const LlPlan plan = ll_plan_of(ll.op, args.plan);
  Images images(args);
  for (int step = 1; step <= comm.num_ranks; ++step)
    if (send_words(ll, ids, (comm.rank + step) % comm.num_ranks) == Wait::kFault) return false;
  if (!hold_at_gate(ll.run)) return false;
  const int T = ll.op.header.num_tokens;
  LlRowLegs legs(ll, plan, experts);
  for (int group = 0; group < ll_groups(T); ++group) send_group(ll, ids, images, legs, group);
  ll_ring_all(ll);
  return true;
}

// -- receive -------------------------------------------------------------------------------------------------------

// The data that a source on this node sends here. A masked source has no tokens.
struct Source {
  int tokens = 0;
  std::vector<int16_t> ids;
};

class Receiver {
 public:
  Receiver(const LlRun& ll, const LlDispatchArgs& args)
      : ll_(ll),
        args_(args),
        header_(ll.op.header),
        plan_(ll_plan_of(ll.op, args.plan)),
        per_rank_(local_experts(ll.op.comm)),
        sources_(ll.op.comm.num_ranks) {}

  bool run() {
    const Comm& comm = ll_.op.comm;
    const int R = comm.num_ranks;
    if (!ll_relay(ll_, kLlRows, nullptr)) return false;
    for (int step = 0; step < R; ++step)
      if (!open((comm.rank + step) % R)) return false;
    if (!open_legs() || !place_rows()) return false;
    for (int step = 0; step < R; ++step) {
      if (!receive((comm.rank + step) % R)) return false;
      if (step == 0 && !hold_at_gate(ll_.run)) return false;
    }
    for (const LlRowLeg& leg : legs_) receive(leg);
    return true;
  }

 private:
  bool open(int s) {
    Source& source = sources_[s];
    const LlWord* words = ll_.own().ids(ll_.parity, s);
    LlHeader header;
    Wait found = ll_open(ll_, s, words, &header);
    if (found == Wait::kThere) {
      source.ids.resize(static_cast<size_t>(header.num_tokens) * header_.topk);
      found = ll_wait_words(ll_, s, words + kLlHeaderWords, source.ids.data(), source.ids.size() * 2);
    }
    if (found == Wait::kThere) source.tokens = header.num_tokens;
    return found != Wait::kFault;
  }

  // The legs of all forwarders, by place of the rank that has sent them. This node has none.
  bool open_legs() {
    const LlOperation& op = ll_.op;
    const int G = op.comm.num_ranks;
    for (int place = 0; op.shape.num_nodes > 1 && place < ll_num_ranks(op); ++place) {
      legs_.push_back({nullptr, ll_leg_layout(kLlRows, header_, op.shape), header_.topk, 0, 0});
      if (place / G == op.node) continue;
      const int forwarder = place % G, origin = ll_origin_of(op.node, place / G);
      if (!ll_wait_leg(ll_, forwarder, origin)) return false;
      LlRowLeg& leg = legs_.back();
      leg.at = ll_legs(op, forwarder).leg(kLlRows, kLlIn, op.slot, origin);
      if (!ll_check_leg(ll_, kLlRows, leg.at, ll_rank_at(op, place), -1, -1)) return false;
      const LlLegHeader& found = *reinterpret_cast<const LlLegHeader*>(leg.at);
      leg.num_rows = std::min(found.num_rows, header_.max_tokens);
      leg.num_tokens = std::min(found.header.num_tokens, header_.max_tokens);
    }
    return true;
  }

  // The local expert of an id in this node; -1: it is on another rank, or dropped.
  int local_of(int16_t id) const {
    const int local = id - ll_.op.comm.rank * per_rank_;
    return id != kDropped && local >= 0 && local < per_rank_ ? local : -1;
  }
  int32_t* rows_of(int rank) const { return plan_.rows + int64_t{rank} * header_.max_tokens * header_.topk; }

  // Writes the plan and the tables of counts.
  bool place_rows() {
    const LlOperation& op = ll_.op;
    const int G = op.comm.num_ranks, R = ll_num_ranks(op);
    std::vector<int32_t> of_source(per_rank_);
    counts_.assign(per_rank_, 0);
    for (int rank = 0; rank < R; ++rank) {
      const int place = ll_place_of(op, rank);
      std::fill(of_source.begin(), of_source.end(), 0);
      if (!(place / G == op.node ? place_source(rank, place % G, of_source) : place_leg(rank, place, of_source)))
        return false;
      for (int local = 0; local < per_rank_; ++local) {
        plan_.layout_range[local * R + rank] = static_cast<int64_t>(counts_[local]) << 32 | of_source[local];
        counts_[local] += of_source[local];
      }
    }
    for (int local = 0; local <= per_rank_; ++local)
      at<int32_t>(args_.expert_offset)[local] = static_cast<int32_t>(local * plan_.expert_rows);
    std::copy(counts_.begin(), counts_.end(), at<int32_t>(args_.expert_count));
    for (int local = 0; local < per_rank_ && args_.cumulative != 0; ++local)
      at<int32_t>(args_.cumulative)[local] += counts_[local];
    return true;
  }

  // Places the rows of a rank on this node, and counts them by expert.
  bool place_source(int rank, int s, std::vector<int32_t>& of_source) {
    const Comm& comm = ll_.op.comm;
    const Source& source = sources_[s];
    const int K = header_.topk;
    plan_.src_tokens[rank] = plan_.src_rows[rank] = source.tokens;
    for (int64_t pair = 0; pair < static_cast<int64_t>(source.tokens) * K; ++pair) {
      const int16_t id = source.ids[pair];
      if (id < kDropped || id >= comm.num_experts)
        return fail(comm, kBadData, ll_.run.step, s, 0, comm.num_experts, id);
      const int local = local_of(id);
      if (local >= 0 && of_source[local] == source.tokens)
        return fail(comm, kBadData, ll_.run.step, s, 1, source.tokens, source.tokens + 1);
      place_pair(rank, pair, local, local < 0 ? 0 : of_source[local]++, static_cast<int32_t>(pair / K));
    }
    return true;
  }

  // Places the rows of a rank on another node. Its counts and positions agree, or this is a fault.
  bool place_leg(int rank, int place, std::vector<int32_t>& of_source) {
    const LlRowLeg& leg = legs_[place];
    const int K = header_.topk, begin = ll_.op.comm.rank * per_rank_, tokens = leg.num_tokens;
    const auto is_bad = [&](int what, int64_t expected, int64_t seen) {
      return fail(ll_.op.comm, kBadData, ll_.run.step, ll_index_of(ll_.op, rank), what, expected, seen);
    };
    plan_.src_tokens[rank] = tokens;
    plan_.src_rows[rank] = leg.num_rows;
    for (int row = 0; row < leg.num_rows; ++row) {
      const int32_t token = leg.token(row);
      if (token < 0 || token >= tokens) return is_bad(0, tokens, token);
      for (int k = 0; k < K; ++k) {
        const int local = local_of(leg.ids(row)[k]);
        const int most = local < 0 ? 0 : std::min(tokens, leg.count(begin + local));
        if (local >= 0 && (leg.positions(row)[k] != of_source[local] || of_source[local] >= most))
          return is_bad(1, of_source[local], leg.positions(row)[k]);
        place_pair(rank, int64_t{row} * K + k, local, local < 0 ? 0 : of_source[local]++, token);
      }
    }
    for (int local = 0; local < per_rank_; ++local)
      if (of_source[local] != leg.count(begin + local)) return is_bad(2, of_source[local], leg.count(begin + local));
    return true;
  }

  // Notes the row of a pair, which is at `position` among the pairs of its source for a local expert, if it is here.
  void place_pair(int rank, int64_t pair, int local, int position, int32_t token) {
    int32_t& row = rows_of(rank)[pair] = -1;
    if (local < 0) return;
    row = static_cast<int32_t>(local * plan_.expert_rows + counts_[local] + position);
    plan_.src_info[row] = token;
  }

  bool receive(int s) {
    const Source& source = sources_[s];
    const int K = header_.topk, size = ll_group_tokens(source.tokens);
    const LlBlock own = ll_.own();
    int flagged = -1;  // the latest group whose flag is known to be there
    for (int token = 0; token < source.tokens; ++token) {
      const int32_t* rows = rows_of(ll_rank_here(ll_.op, s)) + int64_t{token} * K;
      if (std::all_of(rows, rows + K, [](int32_t row) { return row < 0; })) continue;
      Wait found = Wait::kThere;
      if (token / size != flagged)
        found = ll_wait_flag(ll_, s, own.flag(ll_.kind, ll_.parity, s, flagged = token / size));
      if (found == Wait::kFault) return false;
      if (found == Wait::kMasked) flagged = -1;  // its other rows become zeros, too
      const char* from = own.slot(ll_.kind, ll_.parity, s, token);
      for (int k = 0; k < K; ++k)
        if (rows[k] >= 0) write_row(found == Wait::kThere ? from : nullptr, rows[k]);
    }
    return true;
  }

  void receive(const LlRowLeg& leg) {
    if (leg.at == nullptr) return;
    const int32_t* rows = rows_of(ll_rank_at(ll_.op, static_cast<int>(&leg - legs_.data())));
    for (int64_t pair = 0; pair < int64_t{leg.num_rows} * header_.topk; ++pair)
      if (rows[pair] >= 0) write_row(leg.image(static_cast<int>(pair / header_.topk)), rows[pair]);
  }

  // Copies an image to an output row. No image: zeros.
  void write_row(const char* image, int64_t row) {
    const int64_t bytes = header_.row_bytes;
    char* to = at<char>(args_.tokens, row * bytes);
    if (image == nullptr)
      std::memset(to, 0, bytes);
    else
      std::memcpy(to, image, bytes);
    if (header_.format == kLlPlain) return;
    // The scales of an expert lie [column][row]. A column is a float32, or four exponents.
    const int64_t columns = ceil_div(header_.scale_bytes, kScaleBytes), rows = plan_.expert_rows;
    int32_t* scales = at<int32_t>(args_.scales) + row / rows * columns * rows + row % rows;
    const char* from = image == nullptr ? nullptr : image + ll_scales_offset(bytes);
    for (int64_t column = 0; column < columns; ++column) {
      int32_t value = 0;
      if (from != nullptr) std::memcpy(&value, from + column * kScaleBytes, kScaleBytes);
      scales[column * rows] = value;
    }
  }

  const LlRun& ll_;
  const LlDispatchArgs& args_;
  const LlHeader& header_;
  const LlPlan plan_;
  const int per_rank_;
  std::vector<Source> sources_;  // by local rank
  std::vector<LlRowLeg> legs_;   // by place
  std::vector<int32_t> counts_;  // of the rows placed so far, by local expert
};

void poison(const LlDispatchArgs& args) {
  const Comm& comm = args.op.comm;
  const LlPlan plan = ll_plan_of(args.op, args.plan);
  const int per_rank = local_experts(comm);
  std::fill_n(at<int32_t>(args.expert_count), per_rank, 0);
  std::fill_n(at<int32_t>(args.expert_offset), per_rank + 1, 0);
  std::fill_n(plan.layout_range, per_rank * ll_num_ranks(args.op), 0);
  std::fill_n(plan.src_tokens, ll_num_ranks(args.op), 0);
  std::fill_n(plan.src_rows, ll_num_ranks(args.op), 0);
}

}  // namespace

void ll_dispatch(const LlDispatchArgs& args) {
  LlRun ll{args.op, kLlDispatch, {args.op.comm, kNoStep, 0}, 0};
  if ((args.op.phases & kLlSend) != 0 && ll_begin(args.op, kLlDispatch, kLlSend, &ll) && send_all(ll, args))
    ll_finish_send(ll);
  if ((args.op.phases & kLlReceive) == 0) return;
  if (!ll_begin(args.op, kLlDispatch, kLlReceive, &ll) || !Receiver(ll, args).run()) return poison(args);
  ll_finish_receive(ll);
}

}  // namespace ep::cpu
