// What the bindings share: argument structs made from keywords, enums, arrays of a word for each rank, kernels that run
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

#include "common/layout.h"

namespace ep::bindings {

namespace py = pybind11;

// Each adds its part to the module; the table's submodules come before bind_collectives, which adds to them.
void bind_kernels(py::module_& m);
void bind_collectives(py::module_& m);
void bind_board(py::module_& m);
#if defined(EP_WITH_CUDA)
void bind_device(py::module_& m);
#endif

// A struct whose fields are given by keyword; what is not given is zero, a name it lacks is an AttributeError. One is
// made for every launch, so each value goes straight to its field.
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
    PyObject* name;  // interned, as keywords are; never given back, since classes live as long as the process
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

// An enum as Python's IntEnum: its members are the numbers that structs and faults hold.
inline void bind_enum(py::module_& m, const char* name,
                      std::initializer_list<std::pair<const char*, int64_t>> members) {
  py::dict named;
  for (const auto& [member, value] : members) named[member] = value;
  m.attr(name) = py::module_::import("enum").attr("IntEnum")(name, named, py::arg("module") = m.attr("__name__"));
}

// One word for each rank.
template <class Word>
void set_words(Word* to, const std::vector<Word>& from) {
  if (from.size() > kMaxRanks)
    throw py::value_error("ranks: expected at most " + std::to_string(kMaxRanks) + ", got " +
                          std::to_string(from.size()));
  std::copy(from.begin(), from.end(), to);
}

// A list of numbers as the field of a struct that is an array.
template <class Args, class Word>
auto array_of(Word (Args::*member)[kMaxRanks]) {
  return [member](Args& args, const std::vector<Word>& from) { set_words(args.*member, from); };
}

// An exception that a signal's handler has set during a wait.
inline void raise_interruption() {
  if (PyErr_Occurred()) throw py::error_already_set();
}

// Kernels run, or are enqueued, without the interpreter's lock.
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
