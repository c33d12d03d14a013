// The kernels of dispatch and combine over several nodes, segment by segment. Python calls the rail between them.
//
// A segment is what one dispatch inside the node sends: this rank's own tokens, or the tokens of other nodes in one
// chunk. Shapes: T_m tokens of segment m, K experts per token, G ranks of the node, N nodes, M segments.
#pragma once
#include <cstdint>
#include <vector>

#include "control/high_throughput.h"

namespace ep::control {

// The routing in a handle (moe/across_nodes/routing.py).
struct SegmentedRouting {
  Nodes nodes;
  Address plan;       // rail_rows [T,N], meta [M,W], then of each segment topk_ids, send_pos and pair_pos
  Address recv_rows;  // [sum of slots, K]; 0: not made yet
  std::vector<int64_t> tokens, slots;  // of each segment
  int64_t topk;
};
Routing segment_of(const HighThroughput& engine, const SegmentedRouting& routing, int segment);

struct SegmentedDispatch {
  SegmentedRouting routing;
  Header header;  // op: of the messages and of notify. num_tokens: of each kernel's own
  Address ids;    // [T,K] as the caller gave them
  int32_t id_bytes;
  int32_t padded;                // as in Origins
  Address own_ids;               // [T,K]
  Address messages;              // int64 [2,N,message_words]: sent, received
  Address block_counts;          // room for each segment
  DispatchSendArgs own, landed;  // the rows of segment 0, and those of the other segments, one after the other
  Address landed_ids;            // [sum of T_m, K] with `landed`; not read if the routing is known
  DispatchRecvArgs output;       // of all segments

  // Each enqueues kernels on the own stream. Returns false with Python's error set.
  bool lay_out(const HighThroughput& engine) const;
  // Notifies all segments with tickets up to `ticket`; 0: the host waits for no totals. Then places all rows.
  bool notify(const HighThroughput& engine, const Sms& sms, uint64_t ticket) const;
  bool send(const HighThroughput& engine, const Sms& sms, int segment) const;
  bool receive(const HighThroughput& engine, const Sms& sms, int segment) const;
};

struct SegmentedCombine {
  SegmentedRouting routing;
  Header header;
  CombineSendArgs rows;               // of the dispatch's output
  std::vector<Address> sums, extras;  // of each segment: [T_m, hidden], and [T_m, K] or 0

  bool send(const HighThroughput& engine, const Sms& sms, int segment) const;
  bool receive(const HighThroughput& engine, const Sms& sms, int segment) const;
};

}  // namespace ep::control
