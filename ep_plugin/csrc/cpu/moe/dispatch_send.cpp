// Dispatch send: stores each row once into a slot on every rank that holds one of its experts. The head before the row
// says which output rows it becomes. Rows go chunk by chunk, so that receivers start before the last row has left.
//
// Before writing, a send waits until all destinations have consumed the previous epoch. It never waits for rows. A slot
// is [pad | ids[K] | positions[K] | weights[K] | scales | row], see SlotLayout. The arrival of a chunk is stored with
// release order, after the chunk's rows.
#include <cstring>
#include <vector>

#include "cpu/core/quantize.h"
#include "cpu/moe/handle.h"
#include "cpu/moe/kernels.h"

namespace ep::cpu {

namespace {

// A token's row and scales as they are sent.
struct Payload {
  const char* row;
  const char* scales;
};

// Finds each token's payload in the caller's tensors, or quantises it into a buffer that the next call overwrites.
class Payloads {
 public:
  explicit Payloads(const DispatchSendArgs& args) : args_(args) {
    if (args.quantize == 0) return;
    require_quantizable(args.header, args.element);
    row_.resize(args.header.row_bytes);
    scales_.resize(args.header.scale_bytes / kScaleBytes);
  }

  Payload of(int t) {
    const char* row = at<char>(args_.x, t * args_.x_stride);
    if (args_.quantize == 0) return {row, at<char>(args_.scales, t * args_.scale_stride)};
    with_element(args_.element, [&](auto element) {
      quantize_row(reinterpret_cast<const decltype(element)*>(row), args_.header.row_bytes, row_.data(),
                   scales_.data());
    });
    return {reinterpret_cast<const char*>(row_.data()), reinterpret_cast<const char*>(scales_.data())};
  }

 private:
  const DispatchSendArgs& args_;
  std::vector<uint8_t> row_;
  std::vector<float> scales_;
};

// Writes the head of a token's slot, which is the same for all destinations.
void write_head(const DispatchSendArgs& args, int t, const char* scales, char* slot, const SlotLayout& lay) {
  const int K = args.routing.topk;
  const int64_t weight_bytes = args.header.weight_bytes * K;
  const int32_t* ids = at<const int32_t>(args.routing.topk_ids) + static_cast<int64_t>(t) * K;
  const int32_t* positions = at<const int32_t>(args.routing.pair_pos) + static_cast<int64_t>(t) * K;
  std::memcpy(slot + lay.ids, ids, K * sizeof(int32_t));
  std::memcpy(slot + lay.positions, positions, K * sizeof(int32_t));
  if (weight_bytes != 0) std::memcpy(slot + lay.weights, at<char>(args.weights, t * weight_bytes), weight_bytes);
  if (args.header.scale_bytes != 0) std::memcpy(slot + lay.scales, scales, args.header.scale_bytes);
}

bool send_token(const Run& run, const DispatchSendArgs& args, const SlotLayout& lay, const Payload& payload, int t) {
  const Comm& comm = args.comm;
  const int32_t region = region_slots_of(comm, args.header);
  const int32_t* positions = at<const int32_t>(args.routing.send_pos) + static_cast<int64_t>(t) * comm.num_ranks;
  for (int dest = 0; dest < comm.num_ranks; ++dest) {
    if (positions[dest] < 0) continue;
    if (positions[dest] >= region)
      return fail(comm, kBadHandle, run.step, comm.rank, t, region, static_cast<int64_t>(positions[dest]) + 1);
    char* slot = at<char>(pool_at(comm, kDispatchPool, dest),
                          static_cast<int64_t>(comm.rank * region + positions[dest]) * lay.bytes);
    write_head(args, t, payload.scales, slot, lay);
    std::memcpy(slot + lay.row, payload.row, args.header.row_bytes);
  }
  return true;
}

}  // namespace

void dispatch_send(const DispatchSendArgs& args) {
  const Comm& comm = args.comm;
  Payloads payloads(args);
  const Meta meta = meta_of(comm, args.routing);
  Run run{comm, kDispatchSend, 0};
  if (!begin(comm, kDispatchSend, &run)) return;
  if (args.header.op == kOpCachedDispatch &&
      !check_handle(run, sent_items(comm), [&](int i) { return sent_is_sound(args.routing, meta, i); }))
    return;
  if (pools_must_grow(comm, args.header, meta)) {
    if (args.optimistic == 0)
      fail(comm, kTooSmall, kDispatchSend, comm.rank, 0, region_slots_of(comm, args.header), *meta.max_rows);
    return;
  }
  for (int dest = 0; dest < comm.num_ranks; ++dest)
    if (!open_destination(run, kDispatchPool, dest, args.header)) return;

  const int T = args.routing.num_tokens;
  const Chunks chunks = chunks_of(T);
  const SlotLayout lay = slot_layout_of(args.header);
  for (int c = 0; c < chunks.count; ++c) {
    for (int t = chunks.begin(c); t < chunks.end(c); ++t)
      if (!send_token(run, args, lay, payloads.of(t), t)) return;
    for (int dest = 0; dest < comm.num_ranks; ++dest) {
      const int32_t* ends = meta.send_chunk_end + dest * kMaxChunks;
      signal_chunk(run, kDispatchPool, dest, c, c == 0 ? 0 : ends[c - 1], ends[c]);
    }
    if (c == 0 && !hold_at_gate(run)) return;
  }
  if (T == 0 && !hold_at_gate(run)) return;
  finish(run);
}

}  // namespace ep::cpu
