// Send: each row once to every rank that holds one of its experts, straight to its final slot, with a record of what
// it expands to. Chunk by chunk, so that receivers start before the last row has left.
#include <cstring>

#include "kernels.h"
#include "sync.h"

namespace ep::cpu {

namespace {

template <class Weight>
void write_weights(const SendArgs& args, int t, int first, int past, char* slot, const SlotLayout& lay) {
  const int K = args.routing.topk;
  const int32_t* ids = at<const int32_t>(args.routing.topk_ids) + static_cast<int64_t>(t) * K;
  const Weight* from = at<const Weight>(args.weights) + static_cast<int64_t>(t) * K;
  Weight* to = reinterpret_cast<Weight*>(slot + lay.weights);
  for (int k = 0; k < K; ++k) to[k] = ids[k] >= first && ids[k] < past ? from[k] : Weight(0);
}

void write_record(const SendArgs& args, const Meta& meta, int t, int dest, int32_t index, char* slot,
                  const SlotLayout& lay) {
  const int K = args.routing.topk, per_rank = local_experts(args.comm);
  const int first = dest * per_rank, past = first + per_rank;
  const int32_t* ids = at<const int32_t>(args.routing.topk_ids) + static_cast<int64_t>(t) * K;
  const int32_t* positions = at<const int32_t>(args.routing.pair_pos) + static_cast<int64_t>(t) * K;
  int32_t* rows = reinterpret_cast<int32_t*>(slot + lay.rows);
  int32_t* locals = reinterpret_cast<int32_t*>(slot + lay.ids);
  for (int k = 0; k < K; ++k) {
    const bool here = ids[k] >= first && ids[k] < past;
    locals[k] = here ? ids[k] - first : -1;
    rows[k] = !here ? -1 : args.routing.layout == kFlat ? meta.flat_base[ids[k]] + positions[k] : index;
  }
  if (args.header.weight_bytes == 4) write_weights<float>(args, t, first, past, slot, lay);
  if (args.header.weight_bytes == 8) write_weights<double>(args, t, first, past, slot, lay);
}

bool send_token(const Run& run, const SendArgs& args, const Meta& meta, const SlotLayout& lay, int t) {
  const Comm& comm = args.comm;
  const int32_t* positions = at<const int32_t>(args.routing.send_pos) + static_cast<int64_t>(t) * comm.num_ranks;
  for (int dest = 0; dest < comm.num_ranks; ++dest) {
    if (positions[dest] < 0) continue;
    const int32_t index = meta.slot_base[dest] + positions[dest];
    const int64_t offset = index * lay.bytes;
    if (offset + lay.bytes > comm.pool_bytes[kDispatchPool])
      return fail(comm, kTooSmall, run.step, dest, 0, comm.pool_bytes[kDispatchPool], offset + lay.bytes);
    char* slot = at<char>(comm.pool[kDispatchPool][dest], offset);
    std::memcpy(slot, at<char>(args.x, t * args.x_stride), args.header.row_bytes);
    if (args.header.scale_bytes != 0)
      std::memcpy(slot + lay.scales, at<char>(args.scales, t * args.scale_stride), args.header.scale_bytes);
    write_record(args, meta, t, dest, index, slot, lay);
  }
  return true;
}

}  // namespace

void send(const SendArgs& args) {
  const Comm& comm = args.comm;
  Run run{comm, kSend, 0, 0};
  if (!begin(comm, kSend, &run)) return;
  for (int dest = 0; dest < comm.num_ranks; ++dest)
    if (!open_destination(run, kDispatchPool, dest, args.header)) return;

  const int T = args.routing.num_tokens, chunk = chunk_tokens(T);
  const Meta meta = meta_of(comm, args.routing);
  const SlotLayout lay = slot_layout_of(args.header);
  for (int c = 0; c < num_chunks(T); ++c) {
    for (int t = c * chunk; t < T && t < (c + 1) * chunk; ++t)
      if (!send_token(run, args, meta, lay, t)) return;
    for (int dest = 0; dest < comm.num_ranks; ++dest) {
      const int32_t* ends = meta.send_chunk_end + dest * kMaxChunks;
      signal_chunk(run, kDispatchPool, dest, c, c == 0 ? 0 : ends[c - 1], ends[c]);
    }
    if (c == 0 && !gate(run)) return;
  }
  if (T == 0 && !gate(run)) return;
  finish(run);
}

}  // namespace ep::cpu
