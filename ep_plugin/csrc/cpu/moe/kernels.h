// The CPU kernels of dispatch and combine, one per file (combine.cpp has both halves). Each runs to its end in the
// calling thread. common/api.h and common/low_latency_args.h describe their arguments.
#pragma once
#include "common/low_latency_args.h"

namespace ep::cpu {
void plan(const PlanArgs& args);
void positions(const PlanArgs& args);
void notify(const NotifyArgs& args);
void place(const PlaceArgs& args);
void dispatch_send(const DispatchSendArgs& args);
void dispatch_recv(const DispatchRecvArgs& args);
void combine_send(const CombineSendArgs& args);
void combine_recv(const CombineRecvArgs& args);
inline void dispatch(const DispatchSendArgs& send_args, const DispatchRecvArgs& recv_args) {
  dispatch_send(send_args);
  dispatch_recv(recv_args);
}
inline void combine(const CombineSendArgs& send_args, const CombineRecvArgs& recv_args) {
  combine_send(send_args);
  combine_recv(recv_args);
}
void weight_grad(const WeightGradArgs& args);
void quantize(const QuantizeArgs& args);
void pack(const PackArgs& args);
void combine_add(const CombineAddArgs& args);
void add_counts(const AddCountsArgs& args);
void layout(const LayoutArgs& args);
void ll_dispatch(const LlDispatchArgs& args);
void ll_combine(const LlCombineArgs& args);
}  // namespace ep::cpu
