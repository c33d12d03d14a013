#include "control/messages.h"

#include <algorithm>
#include <chrono>
#include <tuple>

namespace ep::control {

namespace {

PyObject* name_of_messages() {
  static PyObject* const name = interned("send-receive");
  return name;
}

bool is_contiguous(const DLTensor& tensor) {
  int64_t next = 1;
  for (int dim = tensor.num_dims; dim-- > 0;) {
    if (tensor.shape[dim] == 0) return true;
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != next) return false;
    next *= tensor.shape[dim];
  }
  return true;
}

// Returns an index below `count`, or -1 for anything else.
int index_of(PyObject* number, size_t count) {
  if (!PyLong_CheckExact(number)) return -1;
  int overflow = 0;
  const int64_t index = PyLong_AsLongLongAndOverflow(number, &overflow);
  return overflow == 0 && index >= 0 && index < static_cast<int64_t>(count) ? static_cast<int>(index) : -1;
}

// The place of a message in an order that all ranks share. A GPU runs the kernels of a limited number of messages at a
// time. If all ranks start messages in one order, both ends of the first unfinished message have started it.
std::tuple<int, int, bool, int> turn_of(const Message& message, int rank) {
  const int low = std::min(rank, message.peer);
  return {low, std::max(rank, message.peer), (message.receives != 0) == (rank == low), message.channel};
}

}  // namespace

StartedMessages::~StartedMessages() { engine_->queue->forget(tickets_); }

PyObject* StartedMessages::wait(int64_t limit_ns) { return engine_->wait(*this, limit_ns); }

bool StartedMessages::is_over() const {
  MessageQueue& queue = *engine_->queue;
  return std::all_of(tickets_.begin(), tickets_.end(), [&](uint64_t ticket) { return queue.is_over(ticket); });
}

bool StartedMessages::is_done() const {
  MessageQueue& queue = *engine_->queue;
  return std::all_of(tickets_.begin(), tickets_.end(), [&](uint64_t ticket) { return queue.is_done(ticket); });
}

// Reads the arguments of one message. Returns false if Python must take the call.
bool Messages::read(PyObject* const* args, Inputs& inputs, Message& message) const {
  const auto& [receives, object, rank, lane] = *reinterpret_cast<PyObject* const(*)[4]>(args);
  const int peer = index_of(rank, places.size()), channel = index_of(lane, num_channels);
  if (object == Py_None || peer < 0 || places[peer] < 0 || channel < 0) return false;
  if (!inputs.read(object)) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();  // not Ctrl-C
    return false;
  }
  const DLTensor& tensor = inputs.last();
  if (tensor.device_type != (is_on_gpu() ? kDLCuda : kDLCpu) || (is_on_gpu() && tensor.device_id != device_index))
    return false;
  PyObject* const code = PyDict_GetItemWithError(codes.get(), descriptors().dtype.of(object).get());
  if (code == nullptr || !is_contiguous(tensor)) return false;
  message = {places[peer],       channel,          receives == Py_True,    0,
             address_of(tensor), bytes_of(tensor), PyLong_AsLongLong(code)};
  return true;
}

bool Messages::start(PyObject* const* args, Py_ssize_t count, std::shared_ptr<StartedMessages>& started) {
  static PyObject* const whole = interned("");
  const Object done(in_turn(*this, [&](Turn& turn) -> PyObject* {
    uint64_t stream = 0;
    if (count == 0 || !turn.enter() || !current_stream(&stream)) return left();
    Inputs inputs;
    std::vector<Message> messages(count / 4);
    Object memory(PyList_New(0));
    int64_t nbytes = 0;
    for (size_t i = 0; i < messages.size(); ++i) {
      if (!memory || !read(args + 4 * i, inputs, messages[i])) return left();
      const Object storage = descriptors().untyped_storage.of(args[4 * i + 1]);
      if (!storage || PyList_Append(memory.get(), storage.get()) != 0) return nullptr;
      nbytes += messages[i].bytes;
    }
    if (!turn.begin(name_of_messages(), whole, nbytes, nullptr)) return nullptr;
    started = keep(turn.logged(), std::move(memory));
    return turn.end(started && post(*started, std::move(messages))) ? Py_NewRef(Py_None) : nullptr;
  }));
  return static_cast<bool>(done);
}

std::shared_ptr<StartedMessages> Messages::keep(const Call& call, Object memory) {
  if (kept_.size() >= sweep_at_) sweep();
  if (PyErr_Occurred()) return nullptr;
  auto started = std::make_shared<StartedMessages>(shared_from_this(), call, std::move(memory));
  kept_[started.get()] = started;
  return started;
}

bool Messages::post(StartedMessages& started, std::vector<Message> messages) {
  uint64_t stream = 0;
  if (!current_stream(&stream)) return false;
  if (in_order)
    std::stable_sort(messages.begin(), messages.end(), [this](const Message& one, const Message& other) {
      return turn_of(one, comm->rank) < turn_of(other, comm->rank);
    });
  return run_unlocked([&] {
    for (const Message& message : messages) started.tickets_.push_back(queue->post(message, stream));
  });
}

bool Messages::is_over(StartedMessages& started) {
  static PyObject* const over_name = interned("is_over");
  ++num_looks;
  if (!started.is_over()) return false;
  return !started.transfers || control::call(started.transfers.get(), over_name).get() == Py_True;
}

// Stops keeping what is over.
void Messages::sweep() {
  uint64_t stream = 0, capture = 0;
  if (!find_stream(&stream, &capture) || capture != 0) return;  // a capture must not ask for events
  for (const auto& started : kept())
    if (!PyErr_Occurred() && is_over(*started)) kept_.erase(started.get());
  sweep_at_ = std::max(kKept, 2 * kept_.size());
}

PyObject* Messages::wait(StartedMessages& started, int64_t limit_ns) {
  static PyObject *const copy_name = interned("_is_copy"), *const check_name = interned("check"),
                         *const error_name = interned("error"), *const wait_name = interned("wait"),
                         *const part = interned("wait");
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::nanoseconds(limit_ns);
  const Object owner = this->owner();
  if (!owner) return PyErr_SetNone(PyExc_ReferenceError), nullptr;
  if (!is(owner.get(), copy_name, Py_False) && !control::call(owner.get(), check_name)) return nullptr;
  uint64_t stream = 0;
  if (!current_stream(&stream)) return left();
  const unsigned long thread = PyThread_get_thread_ident();
  waiters.push_back(thread);
  Call logged;
  WaitResult result = kFaulted;
  const auto arrive = [&]() -> PyObject* {
    if (!log_->begin(logged, name_of_messages(), part, started.call.nbytes, &started.call)) return nullptr;
    if (!run_unlocked([&] { result = queue->wait(started.tickets_, limit_ns, comm->timeout_ns, stream); }))
      return nullptr;
    if (result == kOverdue) return Py_NewRef(Py_False);
    if (result != kReady) {
      const Object error = control::call(owner.get(), error_name);
      if (error) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
      return nullptr;
    }
    if (!started.transfers) return Py_NewRef(Py_True);
    const std::chrono::duration<double> rest = until - Clock::now();
    const Object seconds(limit_ns == 0 ? Py_NewRef(Py_None) : PyFloat_FromDouble(std::max(0.0, rest.count())));
    return seconds ? control::call(started.transfers.get(), wait_name, seconds.get()).release() : nullptr;
  };
  Object arrived(arrive());
  if (arrived)
    CallLog::end(logged);
  else
    failed(name_of_messages());
  waiters.erase(std::find(waiters.begin(), waiters.end(), thread));
  close_if_asked();
  if (arrived.get() == Py_True) {
    const Object freed = std::exchange(started.memory, Object());
    kept_.erase(&started);
  }
  return PyErr_Occurred() ? nullptr : arrived.release();
}

std::vector<std::shared_ptr<StartedMessages>> Messages::kept() const {
  std::vector<std::shared_ptr<StartedMessages>> all;
  for (const auto& [key, started] : kept_) all.push_back(started);
  return all;
}

void Messages::close() {
  run_unlocked([this] { queue->close(); });
  const auto freed = std::exchange(kept_, {});
}

bool Messages::is_waiting() const {
  return std::find(waiters.begin(), waiters.end(), PyThread_get_thread_ident()) != waiters.end();
}

}  // namespace ep::control
