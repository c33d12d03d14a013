// Helpers of the bindings: argument structs from keywords, enums, arrays of one word per rank, and kernels that run
// without the interpreter's lock.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/api.h"
#include "common/layout.h"

namespace ep::bindings {

namespace py = pybind11;

// Each adds its part to the module. bind_kernels() comes first: others add to its submodules.
void bind_kernels(py::module_& m);
void bind_collectives(py::module_& m);
void bind_low_latency(py::module_& m);
void bind_messages(py::module_& m);
void bind_board(py::module_& m);
void bind_control(py::module_& m);
void bind_high_throughput(py::module_& m);
void bind_cuda(py::module_& m);  // only in builds with CUDA

// The functions of one table, in a submodule of this name.
void bind_table(py::module_& m, const char* name, const KernelTable& table);

// A struct with fields that are given by keyword. Fields that are not given are 0; an unknown name is an
// AttributeError. A launch makes one, so keywords are matched by pointer and values are stored without a copy of the
// struct.
template <class Args>
class Struct : public py::class_<Args> {
 public:
  Struct(py::module_& m, const char* name) : py::class_<Args>(m, name), fields_(std::make_shared<Fields>()) {
    this->def(py::init([fields = fields_](const py::kwargs& given) {
      Args args{};
      size_t guess = 0;  // callers name fields in the struct's order
      for (auto [name, value] : given) {
        const size_t at = index_of(*fields, name, guess);
        (*fields)[at].read(args, value);
        guess = at + 1;
      }
      return args;
    }));
    this->def("copy", [](const Args& args) { return args; });
    this->attr("nbytes") = sizeof(Args);
  }

  template <class Value>
  Struct& field(const char* name, Value Args::* member) {
    this->def_readwrite(name, member);
    auto read = [member](Args& args, py::handle value) { args.*member = value.cast<Value>(); };
    fields_->push_back({py::str(name).release().ptr(), std::move(read)});
    PyUnicode_InternInPlace(&fields_->back().name);
    return *this;
  }

 private:
  struct Field {
    PyObject* name;  // interned, as keywords are. Never released, because classes live as long as the process
    std::function<void(Args&, py::handle)> read;
  };
  using Fields = std::vector<Field>;

  static size_t index_of(const Fields& fields, py::handle name, size_t guess) {
    for (size_t i = 0; i < fields.size(); ++i)
      if (const size_t at = (guess + i) % fields.size(); fields[at].name == name.ptr()) return at;
    for (size_t at = 0; at < fields.size(); ++at)
      if (PyUnicode_Compare(fields[at].name, name.ptr()) == 0) return at;
    throw py::attribute_error("no field " + name.cast<std::string>());
  }

  const std::shared_ptr<Fields> fields_;
};

// Expands to macro(type, first) macro(type, second) ... The preprocessor expands no macro inside itself, so each step
// leaves the next one to another scan. The scans are enough for 80 arguments.
#define EP_EACH(macro, type, ...) EP_SCAN(EP_SCAN(EP_SCAN(EP_SCAN(EP_STEP(macro, type, __VA_ARGS__)))))
#define EP_STEP(macro, type, first, ...) macro(type, first) __VA_OPT__(EP_NEXT EP_PARENS(macro, type, __VA_ARGS__))
#define EP_NEXT() EP_STEP
#define EP_PARENS ()
#define EP_SCAN(...) EP_SCAN_4(EP_SCAN_4(EP_SCAN_4(EP_SCAN_4(__VA_ARGS__))))
#define EP_SCAN_4(...) EP_SCAN_1(EP_SCAN_1(EP_SCAN_1(EP_SCAN_1(__VA_ARGS__))))
#define EP_SCAN_1(...) __VA_ARGS__

// A struct of the module `m` with these fields, as in EP_STRUCT(m, Message, peer, channel).
#define EP_FIELD(type, name) .field(#name, &type::name)
#define EP_STRUCT(m, type, ...) Struct<type>(m, #type) EP_EACH(EP_FIELD, type, __VA_ARGS__)

// An enum as Python's IntEnum. Its members are the numbers in structs and faults.
inline void bind_enum(py::module_& m, const char* name,
                      std::initializer_list<std::pair<const char*, int64_t>> members) {
  py::dict named;
  for (const auto& [member, value] : members) named[member] = value;
  m.attr(name) = py::module_::import("enum").attr("IntEnum")(name, named, py::arg("module") = m.attr("__name__"));
}

// Copies words into an array that has room for more.
template <class Word, size_t kMost>
void set_words(Word (&to)[kMost], const std::vector<Word>& from) {
  if (from.size() > kMost)
    throw py::value_error("ranks: expected at most " + std::to_string(kMost) + ", got " + std::to_string(from.size()));
  std::copy(from.begin(), from.end(), to);
}

// Returns the address of a tensor; 0 for None.
Address address_of(py::handle tensor);

// Raises the exception that a signal handler has set during a wait.
inline void raise_interruption() {
  if (PyErr_Occurred()) throw py::error_already_set();
}

// Adds a function that runs or enqueues a kernel, without the interpreter's lock.
template <class... Args>
void bind_kernel(py::module_& m, const char* name, void (*kernel)(const Args&...)) {
  m.def(name, [kernel](const Args&... args) {
    {
      py::gil_scoped_release release;
      kernel(args...);
    }
    raise_interruption();
  });
}

}  // namespace ep::bindings
