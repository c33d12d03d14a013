// Dispatch send and receive in one kernel, for few SMs. With few SMs, the bytes that an SM can store limit a dispatch.
// In two kernels, SMs would wait for peers or for the links while the other half has work. The output must exist before
// the launch.
//
// Roles. In each CTA the first warps send, the next one signals chunks, and the others receive. dispatch_send.cu and
// dispatch_recv.cu describe these roles, the buffers, the memory order, and the outputs after a fault. Each role has a
// part of the shared memory. On the bulk path, a rank's rows for itself skip the pool: the sending warp stores them to
// their output rows. The kernel is launched cooperatively because its CTAs both send and wait for rows. All CTAs run at
// the same time, so a rank's rows leave even if its receiving warps wait.
#include "cuda/moe/dispatch_recv.cuh"
#include "cuda/moe/dispatch_send.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kMaxWarps = 6;  // sending warps, and as many receiving warps
constexpr int kMaxThreads = (2 * kMaxWarps + 1) * kWarp;

template <bool kBulk>
__device__ void receive(const Run& run, const DispatchRecvArgs& args, const Meta& meta, const Cut& cut) {
  const Output out(run, args);
  clear_padding(out, team_of_warps(cut.first_warp, cut.warps));
  const int thread = warp_in(cut) * kWarp + lane_id();
  if (blockIdx.x == 0) write_tables(out, thread, cut.warps * kWarp);
  if (!open_sources_of_warp(run, kDispatchPool, args.header, meta.src_tokens, cut.first_warp)) return;
  if (blockIdx.x == 0 && thread == 0) hold_at_gate(run);
  __syncwarp();
  DispatchRecvJob job(out, cut, kBulk);
  copy_rows<kBulk>(job, run, cut);
}

template <bool kBulk, class From>
__device__ void send_rows_of_warp(const Run& run, const DispatchSendArgs& args, const Meta& meta, const Cut& cut,
                                  Progress& progress, const Output& out) {
  if constexpr (kBulk) {
    uint64_t* dests = list_of_warp(cut) + cut.list_entries - RowWriter::list_size(args.routing);
    DispatchSendJob<RowWriter> job(run, args, meta, cut, progress, RowWriter(out, dests));
    send_rows<kBulk, From>(job, run, cut);
  } else {
    DispatchSendJob<ThroughPool> job(run, args, meta, cut, progress);
    send_rows<kBulk, From>(job, run, cut);
  }
}

// From: as for send_rows().
template <bool kBulk, class From>
__global__ void __launch_bounds__(kMaxThreads, 1)
    ep_dispatch(const __grid_constant__ DispatchSendArgs send, const __grid_constant__ DispatchRecvArgs recv,
                const __grid_constant__ Cut send_cut, const __grid_constant__ Cut recv_cut) {
  __shared__ Progress progress;
  const Comm& comm = send.comm;
  const Meta meta = meta_of(comm, send.routing);
  const Run sending = enter(comm, kDispatchSend), receiving = enter(comm, kDispatchRecv);
  bool ok = sending.ok && receiving.ok;
  progress.clear();
  if (ok) {
    const bool may_write = destinations_have_read(sending, kDispatchPool);
    ok = may_send(may_write && sends_fit(sending, send, meta) && slots_fit(receiving, recv));
  }
  if (ok) {
    if (send.routing.num_tokens == 0 && blockIdx.x == 0 && threadIdx.x == 0) hold_at_gate(sending);
    __syncwarp();
    if (warp_id() < send_cut.warps)
      send_rows_of_warp<kBulk, From>(sending, send, meta, send_cut, progress, Output(receiving, recv));
    else if (warp_id() > send_cut.warps)
      receive<kBulk>(receiving, recv, meta, recv_cut);
    else {
      open_destinations(sending, kDispatchPool, send.header);
      signal_chunks(sending, kDispatchPool, progress, send_cut.warps, SentChunks(sending, send, meta, 1));
    }
  }
  if (last_to_finish(sending) && !faulted(comm)) finish_sending(sending, kDispatchPool);
  if (last_to_finish(receiving)) finish_dispatch_recv(receiving, recv, meta);
}

template <bool kBulk, class From>
void launch_both(const DispatchSendArgs& send, const DispatchRecvArgs& recv, const Cut& send_cut, Cut recv_cut) {
  recv_cut.first_warp = send_cut.warps + 1;
  recv_cut.shared_begin = align_up(send_cut.shared_bytes(), kSlotAlign);
  const int threads = (recv_cut.first_warp + recv_cut.warps) * kWarp;
  launch_cooperatively<ep_dispatch<kBulk, From>>("dispatch", send.num_sms, threads,
                                                 recv_cut.shared_begin + recv_cut.shared_bytes(), send.stream, send,
                                                 recv, send_cut, recv_cut);
}

// Sending and receiving warps get half of the shared memory each.
template <class From>
void choose_both(const DispatchSendArgs& send, const DispatchRecvArgs& recv) {
  using Job = DispatchSendJob<RowWriter>;
  const KernelLimits limits = limits_of<ep_dispatch<true, From>>();
  const SlotLayout lay = slot_layout_of(send.header);
  const int recv_list = RowWriter::list_size(recv.routing);
  const int64_t for_sends = limits.shared_bytes / 2;
  const Cut send_cut = cut_for_warps(lay.image, kMinSendWarps<From>, kMaxWarps, Job::kStages,
                                     Job::kStages * Job::list_size(send.comm.num_ranks) + recv_list, for_sends);
  const Cut recv_cut = cut_for_warps(lay.image, kMinCopyWarps, kMaxWarps, DispatchRecvJob::kStages, recv_list,
                                     limits.shared_bytes - align_up(send_cut.shared_bytes(), kSlotAlign));
  if (limits.bulk && send.comm.plain == 0 && sends_in_bulk<From>(lay, send_cut) && lay.row < recv_cut.piece_bytes)
    launch_both<true, From>(send, recv, send_cut, recv_cut);
  else
    launch_both<false, From>(send, recv,
                             uncut(lay.image, kMaxWarps, DispatchSendJob<ThroughPool>::list_size(send.comm.num_ranks)),
                             uncut(lay.image, kMaxWarps, recv_list));
}

}  // namespace

void dispatch(const DispatchSendArgs& send, const DispatchRecvArgs& recv) {
  require_dispatch_send(send);
  require_dispatch_recv(recv);
  require(send.optimistic + recv.optimistic == 0, "optimistic", "0, because the output exists already", 1);
  require(send.num_sms == recv.num_sms, "num_sms of recv", "the same as of send", recv.num_sms);
  require(send.stream == recv.stream, "stream of recv", "the same as of send", static_cast<int64_t>(recv.stream));
  if (send.quantize == 0) return choose_both<void>(send, recv);
  if (send.element == kBFloat16) return choose_both<FromBFloat16>(send, recv);
  if (send.element == kFloat16) return choose_both<FromFloat16>(send, recv);
  return choose_both<FromFloat32>(send, recv);
}

}  // namespace ep::cuda
