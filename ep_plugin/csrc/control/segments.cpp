#include "control/segments.h"

#include "common/nodes.h"

namespace ep::control {

namespace {

constexpr int64_t kWord = sizeof(int32_t);

// The header of a kernel of this segment.
Header header_of(const Header& header, int64_t op, const SegmentedRouting& routing, int segment) {
  Header of_segment = header;
  of_segment.op = op;
  of_segment.num_tokens = routing.tokens[segment];
  return of_segment;
}

int64_t sum_before(const std::vector<int64_t>& values, int first, int last) {
  int64_t sum = 0;
  for (int i = first; i < last; ++i) sum += values[i];
  return sum;
}

Address meta_of_segment(const HighThroughput& engine, const SegmentedRouting& routing, int segment) {
  const int num_nodes = num_nodes_of(*engine.comm, routing.nodes);
  const int64_t words = meta_layout(engine.size, engine.num_experts, engine.comm->num_origins).words;
  return routing.plan + kWord * (routing.tokens[0] * num_nodes + segment * words);
}

Address received_messages(const HighThroughput& engine, const SegmentedDispatch& dispatch) {
  const MessageLayout layout = message_layout(*engine.comm, dispatch.routing.nodes);
  return dispatch.messages + 8 * num_nodes_of(*engine.comm, dispatch.routing.nodes) * layout.words();
}

}  // namespace

Routing segment_of(const HighThroughput& engine, const SegmentedRouting& routing, int segment) {
  const int num_segments = static_cast<int>(routing.tokens.size());
  const int64_t tokens = routing.tokens[segment], topk = routing.topk, slots = routing.slots[segment];
  const int64_t before = sum_before(routing.tokens, 0, segment) * (2 * topk + engine.size);
  Routing of_segment{};
  of_segment.num_tokens = static_cast<int32_t>(tokens);
  of_segment.topk = static_cast<int32_t>(topk);
  of_segment.layout = engine.layout;
  of_segment.alignment = engine.alignment;
  of_segment.topk_ids = meta_of_segment(engine, routing, num_segments) + kWord * before;
  of_segment.send_pos = of_segment.topk_ids + kWord * tokens * topk;
  of_segment.pair_pos = of_segment.send_pos + kWord * tokens * engine.size;
  of_segment.meta = meta_of_segment(engine, routing, segment);
  if (routing.recv_rows != 0 && slots > 0)
    of_segment.recv_rows = routing.recv_rows + kWord * topk * sum_before(routing.slots, 0, segment);
  of_segment.slots = slots;
  return of_segment;
}

bool SegmentedDispatch::lay_out(const HighThroughput& engine) const {
  LayoutArgs args{};
  args.ids = ids;
  args.nodes = routing.nodes;
  args.messages = messages;
  args.rail_rows = routing.plan;
  args.own_ids = own_ids;
  args.header = header_of(header, header.op, routing, 0);
  args.num_tokens = static_cast<int32_t>(routing.tokens[0]);
  args.topk = static_cast<int32_t>(routing.topk);
  args.num_nodes = num_nodes_of(*engine.comm, routing.nodes);
  args.id_bytes = id_bytes;
  args.padded = padded;
  args.stream = engine.streams.own;
  return engine.run([&] { engine.kernels.layout(args); });
}

bool SegmentedDispatch::notify(const HighThroughput& engine, const Sms& sms, uint64_t ticket) const {
  const int num_segments = static_cast<int>(routing.tokens.size());
  const uint64_t stream = engine.streams.own;
  const PlanArgs plan{*engine.comm, segment_of(engine, routing, 0), routing.nodes, {}, ids, block_counts, id_bytes, 0,
                      stream};
  if (!engine.run([&] { engine.enter(stream, sms); }, [&] { engine.kernels.plan(plan); })) return false;
  for (int segment = 0; segment < num_segments; ++segment) {
    const Origins origins{segment == 0 ? 0 : received_messages(engine, *this), segment - 1, padded};
    const uint64_t of_segment = ticket == 0 ? 0 : ticket - (num_segments - 1 - segment);
    const NotifyArgs args{*engine.comm,
                          segment_of(engine, routing, segment),
                          header_of(header, header.op, routing, segment),
                          routing.nodes,
                          origins,
                          block_counts,
                          of_segment,
                          segment,
                          0,
                          stream};
    if (!engine.run([&] { engine.kernels.notify(args); })) return false;
  }
  const PlaceArgs place{*engine.comm,
                        routing.nodes,
                        meta_of_segment(engine, routing, 0),
                        messages,
                        routing.plan,
                        static_cast<int32_t>(routing.tokens[0]),
                        padded,
                        engine.is_flat() ? engine.alignment : 1,
                        0,
                        stream};
  return engine.run([&] { engine.kernels.place(place); });
}

bool SegmentedDispatch::send(const HighThroughput& engine, const Sms& sms, int segment) const {
  const int64_t begin = segment == 0 ? 0 : sum_before(routing.tokens, 1, segment), topk = routing.topk;
  const uint64_t stream = engine.streams.own;
  DispatchSendArgs args = segment == 0 ? own : landed;
  args.comm = *engine.comm;
  args.routing = segment_of(engine, routing, segment);
  args.header = header_of(header, kOpCachedDispatch, routing, segment);
  args.x += begin * args.x_stride;
  if (args.scales != 0) args.scales += begin * args.scale_stride;
  if (args.weights != 0) args.weights += begin * topk * header.weight_bytes;
  args.num_sms = sms.sending;
  args.stream = stream;
  if (segment == 0 || output.fresh == 0)
    return engine.run([&] { engine.enter(stream, sms); }, [&] { engine.kernels.dispatch_send(args); });
  const Origins origins{received_messages(engine, *this), segment - 1, padded};
  const PlanArgs plan{
      *engine.comm, args.routing, routing.nodes, origins, landed_ids + kWord * begin * topk, block_counts, kWord, 0,
      stream};
  return engine.run([&] { engine.kernels.plan(plan); }, [&] { engine.kernels.positions(plan); },
                    [&] { engine.enter(stream, sms); }, [&] { engine.kernels.dispatch_send(args); });
}

bool SegmentedDispatch::receive(const HighThroughput& engine, const Sms& sms, int segment) const {
  DispatchRecvArgs args = output;
  args.comm = *engine.comm;
  args.routing = segment_of(engine, routing, segment);
  args.header = header_of(header, kOpCachedDispatch, routing, segment);
  args.num_sms = sms.receiving;
  args.stream = engine.streams.own;
  return engine.run([&] { engine.kernels.dispatch_recv(args); });
}

bool SegmentedCombine::send(const HighThroughput& engine, const Sms& sms, int segment) const {
  CombineSendArgs args = rows;
  args.comm = *engine.comm;
  args.routing = segment_of(engine, routing, segment);
  args.header = header_of(header, header.op, routing, segment);
  args.num_sms = sms.sending;
  args.stream = engine.streams.own;
  return engine.run([&] { engine.kernels.combine_send(args); });
}

bool SegmentedCombine::receive(const HighThroughput& engine, const Sms& sms, int segment) const {
  CombineRecvArgs args{};
  args.comm = *engine.comm;
  args.routing = segment_of(engine, routing, segment);
  args.header = header_of(header, header.op, routing, segment);
  args.out = sums[segment];
  args.extra = extras[segment];
  args.hidden = rows.hidden;
  args.element = rows.element;
  args.num_sms = sms.receiving;
  args.stream = engine.streams.own;
  return engine.run([&] { engine.kernels.combine_recv(args); });
}

}  // namespace ep::control
