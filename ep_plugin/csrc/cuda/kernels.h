// The CUDA side of the kernel table, one function per file. Each checks what it can check on the host, raising
// std::invalid_argument, and enqueues; a launch that fails raises std::runtime_error with the kernel's name.
#pragma once
#include "../api.h"

namespace ep::cuda {
void plan(const PlanArgs& args);
void notify(const NotifyArgs& args);
void send(const SendArgs& args);
void admit(const AdmitArgs& args);
void expand(const ExpandArgs& args);
void push(const PushArgs& args);
void add(const AddArgs& args);
void send_and_expand(const SendArgs& send, const ExpandArgs& expand);
void push_and_add(const PushArgs& push, const AddArgs& add);
void weigh_back(const WeighBackArgs& args);
}  // namespace ep::cuda
