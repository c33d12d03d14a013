// Send and expand in one kernel, for few SMs: what an SM can store bounds such a dispatch, and a sender of its own
// waits for peers where it could expand. The output must be there before the launch.
//
// Roles. In each CTA the first warps send, the next one signals chunks, and the others expand; each role is that of
// send.cu or expand.cu, with its own part of the shared memory. A row of this rank for itself does not pass through the
// pool on the bulk path: its sender places it and stores it where it belongs. Launched cooperatively, since CTAs both
// send and wait for rows: all of them run, so every rank's rows leave whatever its receivers wait for. Memory order,
// and outputs after a fault: as in send.cu and expand.cu.
#include "expand_job.cuh"
#include "kernels.h"
#include "send_job.cuh"

namespace ep::cuda {

namespace {

constexpr int kMostWarps = 6;  // of either role
constexpr int kMostThreads = (2 * kMostWarps + 1) * kWarp;

template <bool kBulk>
__device__ void receive(const Run& run, const ExpandArgs& args, const Meta& meta, const Cut& cut) {
  const Output out(run, args);
  clear_padding(out, team_of_warps(cut.first_warp, cut.warps));
  const int thread = warp_in(cut) * kWarp + lane_id();
  if (blockIdx.x == 0) write_tables(out, thread, cut.warps * kWarp);
  if (!open_sources_of_warp(run, kDispatchPool, args.header, meta.src_tokens)) return;
  if (blockIdx.x == 0 && thread == 0) hold_at_gate(run);
  __syncwarp();
  ExpandJob job(out, cut, kBulk);
  copy_rows<kBulk>(job, run, cut);
}

template <bool kBulk, class From>
__device__ void send_rows_of_warp(const Run& run, const SendArgs& args, const Meta& meta, const Cut& cut,
                                  Progress& progress, const Output& out) {
  if constexpr (kBulk) {
    uint64_t* dests = list_of_warp(cut) + cut.list_entries - Placer::list_size(args.routing);
    SendJob<Placer> job(run, args, meta, cut, progress, Placer(out, dests));
    send_rows<kBulk, From>(job, run, cut);
  } else {
    SendJob<ThroughPool> job(run, args, meta, cut, progress);
    send_rows<kBulk, From>(job, run, cut);
  }
}

// From: void, or the type of the elements that are quantised.
template <bool kBulk, class From>
__global__ void __launch_bounds__(kMostThreads, 1)
    send_and_expand_kernel(const __grid_constant__ SendArgs send, const __grid_constant__ ExpandArgs expand,
                           const __grid_constant__ Cut send_cut, const __grid_constant__ Cut expand_cut) {
  __shared__ Progress progress;
  const Comm& comm = send.comm;
  const Meta meta = meta_of(comm, send.routing);
  const Run sending = enter(comm, kSend), receiving = enter(comm, kExpand);
  bool ok = sending.ok && receiving.ok;
  progress.clear();
  if (ok) {
    const bool may_write = destination_has_read(sending, kDispatchPool);
    ok = may_send(may_write && sends_fit(send, meta) && slots_fit(receiving, expand));
  }
  if (ok) {
    if (send.routing.num_tokens == 0 && blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(sending);
    __syncwarp();
    if (warp_id() < send_cut.warps)
      send_rows_of_warp<kBulk, From>(sending, send, meta, send_cut, progress, Output(receiving, expand));
    else if (warp_id() > send_cut.warps)
      receive<kBulk>(receiving, expand, meta, expand_cut);
    else {
      tell_started(sending, kDispatchPool);
      open_destinations(sending, kDispatchPool, send.header);
      signal_chunks(sending, kDispatchPool, progress, send_cut.warps, SentChunks(sending, send, meta, 1));
    }
  }
  if (last_to_finish(sending) && !faulted(comm)) finish_sending(sending, kDispatchPool);
  if (last_to_finish(receiving)) finish_expanding(receiving, expand, meta);
}

template <bool kBulk, class From>
void launch_both(const SendArgs& send, const ExpandArgs& expand, const Cut& send_cut, Cut expand_cut) {
  expand_cut.first_warp = send_cut.warps + 1;
  expand_cut.shared_begin = align_up(send_cut.shared_bytes(), kSlotAlign);
  const int threads = (expand_cut.first_warp + expand_cut.warps) * kWarp;
  launch_cooperatively<send_and_expand_kernel<kBulk, From>>("send_and_expand", send.num_sms, threads,
                                                            expand_cut.shared_begin + expand_cut.shared_bytes(),
                                                            send.stream, send, expand, send_cut, expand_cut);
}

// Those who send and those who expand get half of the shared memory each.
template <class From>
void choose_both(const SendArgs& send, const ExpandArgs& expand) {
  using Job = SendJob<Placer>;
  const Room room = room_for<send_and_expand_kernel<true, From>>();
  const SlotLayout lay = slot_layout_of(send.header);
  const int places = Placer::list_size(expand.routing);
  const int64_t for_sends = room.shared_bytes / 2;
  const Cut send_cut = cut_for_warps(lay.image, kLeastSendWarps<From>, kMostWarps, Job::kStages,
                                     Job::kStages * Job::list_size(send.comm.num_ranks) + places, for_sends);
  const Cut expand_cut = cut_for_warps(lay.image, kLeastCopyWarps, kMostWarps, ExpandJob::kStages, places,
                                       room.shared_bytes - align_up(send_cut.shared_bytes(), kSlotAlign));
  if (room.bulk && send.comm.plain == 0 && sends_in_bulk<From>(lay, send_cut) && lay.row < expand_cut.piece_bytes)
    launch_both<true, From>(send, expand, send_cut, expand_cut);
  else
    launch_both<false, From>(send, expand,
                             uncut(lay.image, kMostWarps, SendJob<ThroughPool>::list_size(send.comm.num_ranks)),
                             uncut(lay.image, kMostWarps, places));
}

}  // namespace

void send_and_expand(const SendArgs& send, const ExpandArgs& expand) {
  require_send(send);
  require_expand(expand);
  require(send.optimistic + expand.optimistic == 0, "optimistic", "0, as the output is there already", 1);
  require(send.num_sms == expand.num_sms, "num_sms of expand", "that of send", expand.num_sms);
  require(send.stream == expand.stream, "stream of expand", "that of send", static_cast<int64_t>(expand.stream));
  if (send.quantize == 0) return choose_both<void>(send, expand);
  if (send.element == kBFloat16) return choose_both<FromBFloat16>(send, expand);
  if (send.element == kFloat16) return choose_both<FromFloat16>(send, expand);
  return choose_both<FromFloat32>(send, expand);
}

}  // namespace ep::cuda
