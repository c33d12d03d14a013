// The CUDA kernels of dispatch and combine, one per file. Each function checks its arguments on the host
// (std::invalid_argument) and enqueues a kernel. A launch that fails throws std::runtime_error with the kernel's name.
// common/api.h and common/low_latency_args.h describe the arguments.
#pragma once
#include "common/low_latency_args.h"

namespace ep::cuda {
void plan(const PlanArgs& args);
void positions(const PlanArgs& args);
void notify(const NotifyArgs& args);
void place(const PlaceArgs& args);
void dispatch_send(const DispatchSendArgs& args);
void dispatch_recv(const DispatchRecvArgs& args);
void combine_send(const CombineSendArgs& args);
void combine_recv(const CombineRecvArgs& args);
void dispatch(const DispatchSendArgs& send, const DispatchRecvArgs& recv);
void combine(const CombineSendArgs& send, const CombineRecvArgs& recv);
void weight_grad(const WeightGradArgs& args);
void quantize(const QuantizeArgs& args);
void pack(const PackArgs& args);
void combine_add(const CombineAddArgs& args);
void add_counts(const AddCountsArgs& args);
void layout(const LayoutArgs& args);
void ll_dispatch(const LlDispatchArgs& args);
void ll_combine(const LlCombineArgs& args);
}  // namespace ep::cuda
