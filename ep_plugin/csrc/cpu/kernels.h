// The CPU side of the kernel table, one function per file.
#pragma once
#include "../api.h"

namespace ep::cpu {
void plan(const PlanArgs& args);
void notify(const NotifyArgs& args);
void send(const SendArgs& args);
inline void admit(const AdmitArgs&) {}  // a sender here has run to its end
void expand(const ExpandArgs& args);
void push(const PushArgs& args);
void add(const AddArgs& args);
}  // namespace ep::cpu
