// The CUDA side of the kernel table, one function per file. Each checks what it can check on the host, raising
// std::invalid_argument, and enqueues; a launch that fails raises std::runtime_error with the kernel's name.
#pragma once
#include "../api.h"

namespace ep::cuda {
void plan(const PlanArgs& args);
void notify(const NotifyArgs& args);
void send(const SendArgs& args);
void expand(const ExpandArgs& args);
void push(const PushArgs& args);
void add(const AddArgs& args);

// Holds `stream` until the sender that `step` (kExpand or kAdd) reads from runs on all its CTAs on this rank, so that
// readers, who wait on SMs for peers, cannot keep it out.
void wait_started(const Comm& comm, Step step, Address stream);
}  // namespace ep::cuda
