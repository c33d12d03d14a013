// Combine send and receive in one kernel, for few SMs. With few SMs, the bytes that an SM can load limit a combine. In
// two kernels, an SM of one half would wait for peers while the other half has work.
//
// Roles. In each CTA the first warps send, the next ones receive, and the last one signals chunks. A warp that has no
// more rows to send also receives. combine_send.cu and combine_recv.cu describe these roles, the buffers, the memory
// order, and the outputs after a fault. The kernel is launched cooperatively because its CTAs both send and wait for
// rows. All CTAs run at the same time, so a rank's rows leave even if its receiving warps wait.
#include <algorithm>

#include "cuda/moe/combine_recv.cuh"
#include "cuda/moe/combine_send.cuh"
#include "cuda/moe/kernels.h"

namespace ep::cuda {

namespace {

constexpr int kReducers = kReduceWarps - 1;
// More warps than the sending part of the work needs: rows arrive late, and these warps receive after they have sent.
constexpr int kSendWarps = 12;

template <class Element, bool kBulk>
__global__ void __launch_bounds__(kReduceWarps* kWarp, 1)
    ep_combine(const __grid_constant__ CombineSendArgs send, const __grid_constant__ CombineRecvArgs recv,
               const __grid_constant__ Cut cut) {
  __shared__ Progress progress;
  __shared__ int32_t bases[kMaxRanks];
  const Comm& comm = send.comm;
  const Meta meta = meta_of(comm, send.routing);
  const SendOrder order(comm);
  const Run sending = enter(comm, kCombineSend), receiving = enter(comm, kCombineRecv);
  bool ok = sending.ok && receiving.ok;
  progress.clear();
  if (ok) {
    const bool may_write = destinations_have_read(sending, kCombinePool), fits = partials_fit(sending, send, meta);
    order.make(meta, partial_layout_of(send.header).bytes);
    ok = partials_fit(receiving, recv, bases) && may_send(may_write && fits);
  }
  if (ok) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && order.chunks() == 0) hold_at_gate(sending);
    __syncwarp();
    if (warp_id() == kReducers) {
      open_destinations(sending, kCombinePool, send.header);
      signal_chunks(sending, kCombinePool, progress, kSendWarps, PartialChunks{sending, meta, order, cut.parts});
    } else {
      ReduceRing<kBulk> ring(cut);
      const bool sends = warp_id() < kSendWarps;
      bool go_on = true;
      if (sends) {
        CombineSendJob job(sending, send, order, cut, kSendWarps, progress);
        go_on = reduce_rows<Element>(job, sending, cut, ring);
      }
      if (go_on && open_sources_of_warp(receiving, kCombinePool, recv.header, nullptr, kSendWarps)) {
        const NextRow parts(receiving, kCombineRecvRows, parts_to_receive(recv, cut), kSendWarps,
                            kReducers - kSendWarps, !sends);
        CombineRecvJob job(receiving, recv, cut, bases, parts);
        reduce_rows<Element>(job, receiving, cut, ring);
      }
    }
  }
  if (last_to_finish(sending) && !faulted(comm)) finish_sending(sending, kCombinePool);
  if (last_to_finish(receiving)) finish_combine_recv(receiving, recv);
}

template <class Element>
void launch_both(const CombineSendArgs& send, const CombineRecvArgs& recv) {
  const KernelLimits limits = limits_of<ep_combine<Element, true>>();
  const bool bulk = limits.bulk && send.comm.plain == 0;
  const int terms = std::max(send.routing.topk, recv.comm.num_ranks);
  const int64_t order_bytes = SendOrder::shared_bytes(send.comm.num_ranks);
  Cut cut = cut_for_sums(send.header.row_bytes, send.routing.num_tokens, kReducers, 2 * terms,
                         limits.shared_bytes - order_bytes, bulk);
  cut.shared_begin = order_bytes;
  const int threads = kReduceWarps * kWarp;
  const int64_t shared_bytes = order_bytes + cut.shared_bytes();
  if (bulk)
    launch_cooperatively<ep_combine<Element, true>>("combine", send.num_sms, threads, shared_bytes, send.stream, send,
                                                    recv, cut);
  else if (limits_of<ep_combine<Element, false>>().shared_bytes >= shared_bytes)  // this also allows so much
    launch_cooperatively<ep_combine<Element, false>>("combine", send.num_sms, threads, shared_bytes, send.stream, send,
                                                     recv, cut);
}

}  // namespace

void combine(const CombineSendArgs& send, const CombineRecvArgs& recv) {
  require_combine_send(send);
  require_combine_recv(recv);
  require(send.element == recv.element, "element of recv", "the same as of send", recv.element);
  require(send.header.row_bytes == recv.header.row_bytes, "row_bytes of recv", "the same as of send",
          recv.header.row_bytes);
  require(send.num_sms == recv.num_sms, "num_sms of recv", "the same as of send", recv.num_sms);
  require(send.stream == recv.stream, "stream of recv", "the same as of send", static_cast<int64_t>(recv.stream));
  switch (send.element) {
    case kFloat32:
      return launch_both<Float32>(send, recv);
    case kBFloat16:
      return launch_both<BFloat16>(send, recv);
    case kFloat16:
      return launch_both<Float16>(send, recv);
  }
  throw std::invalid_argument("element: expected float32, bfloat16 or float16 on CUDA, got code " +
                              std::to_string(send.element));
}

}  // namespace ep::cuda
