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
inline void send_and_expand(const SendArgs& send_args, const ExpandArgs& expand_args) {
  send(send_args);
  expand(expand_args);
}
inline void push_and_add(const PushArgs& push_args, const AddArgs& add_args) {
  push(push_args);
  add(add_args);
}
void weigh_back(const WeighBackArgs& args);
}  // namespace ep::cpu
