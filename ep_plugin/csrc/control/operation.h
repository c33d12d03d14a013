// One operation: what all kinds share, and how earlier ones that are like it are found.
#pragma once
#include <initializer_list>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/engine.h"
#include "control/inputs.h"

namespace ep::control {

// The caller of an operation.
enum class Door {
  kCommunicator,  // MoECommunicator's methods. Python takes calls that PyTorch must see, or that need a gradient
  kOperator,      // the operator below, and operations that were started: somebody above has seen to these
  kBuffer,        // deep_ep.Buffer, of which nothing is differentiable
};

// The arguments of a call that are no tensors.
struct Settings {
  PyObject* const* values = nullptr;
  Py_ssize_t count = 0;
};

// Appends the door and the settings to the form of a call's tensors. Calls of one key need one check. A Buffer checks
// its arguments by rules of its own, so it shares no key with others. Returns false for settings that are neither None
// nor of the types bool, int and str, and for numbers and text that no setting has.
bool append_key(std::string& form, Door door, const Settings& settings);

// Facts that calls of one key share, by key.
template <class Plan>
class Plans {
 public:
  void remember(std::string form, Door door, const Settings& settings, const Plan& plan) {
    if (!append_key(form, door, settings)) return;
    if (by_key_.size() >= kMost) by_key_.clear();
    by_key_[form] = plan;
  }
  // Returns null for calls that need a check. The plan holds until the next remember() or clear().
  const Plan* find(std::string&& form, Door door, const Settings& settings) const {
    if (!append_key(form, door, settings)) return nullptr;
    const auto found = by_key_.find(form);
    return found == by_key_.end() ? nullptr : &found->second;
  }
  void clear() { by_key_.clear(); }

 private:
  static constexpr size_t kMost = 512;
  std::unordered_map<std::string, Plan> by_key_;
};

// It holds all tensors that its kernels use. All of it needs the interpreter's lock.
class Operation {
 public:
  // name: a str that lives as long as the process.
  Operation(PyObject* name, Door door) : door_(door), name_(name) { inputs_.reserve(kMostInputs); }
  virtual ~Operation() = default;
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  virtual Object results() const = 0;  // those of the operator, a tuple
  virtual Object made() const = 0;     // what the door returns
  Object tensors() const;              // all that kernels use, a tuple

  PyObject* name() const { return name_; }
  int64_t number = 0;       // Python finds it by this
  bool is_dropped = false;  // the caller has deleted its Work without waiting
  const Call& logged() const { return call_; }

 protected:
  // Reads and holds tensors in turn. Returns false for a call that Python must take or check.
  bool read(Inputs& inputs, std::initializer_list<std::pair<PyObject*, DLTensor*>> tensors,
            RowsInForm rows = kFixedRows);
  // Whether autograd must record the operation at its end.
  bool needs_grad() const;
  // Holds a tensor that was not read. Returns its address.
  Address hold(Object tensor);

  const Door door_;
  int64_t nbytes_ = 0;
  Call call_{};

 private:
  static constexpr size_t kMostInputs = 8;

  PyObject* const name_;
  std::vector<Object> inputs_;
};

PyObject* or_none(const Object& object);
Object tuple_of(std::initializer_list<PyObject*> fields);
// Returns a named tuple of the class `type`.
Object named_tuple(PyObject* type, std::initializer_list<PyObject*> fields);

// Words of int32, up to where a tensor of its own might begin.
inline int64_t aligned(int64_t words) { return (words + 31) / 32 * 32; }

// Gives each tensor's object to its owner, if it has one. Returns false with Python's error set.
bool give(Results& made, const std::vector<Object*>& owners);

// A small tensor. columns 0: it has one dimension.
struct Part {
  Object* owner;  // null: memory of the shared block without a tensor of its own
  int64_t rows, columns;
  Address* address;  // where to write its address, or null
};
// Makes tensors of int32: views of one block, each of which begins where a tensor of its own might, or if is_shared is
// false, each with its own memory. Returns false with Python's error set.
bool make_parts(Results& made, std::vector<Object*>& owners, const std::vector<Part>& parts, bool is_shared);

}  // namespace ep::control
