#include "control/operation.h"

#include <algorithm>

namespace ep::control {

PyObject* or_none(const Object& object) { return object ? object.get() : Py_None; }

Object tuple_of(std::initializer_list<PyObject*> fields) {
  Object values(PyTuple_New(static_cast<Py_ssize_t>(fields.size())));
  Py_ssize_t at = 0;
  for (PyObject* field : fields)
    if (values) PyTuple_SET_ITEM(values.get(), at++, Py_NewRef(field));
  return values;
}

Object named_tuple(PyObject* type, std::initializer_list<PyObject*> fields) {
  auto* const made_type = reinterpret_cast<PyTypeObject*>(type);
  Object values(made_type->tp_alloc(made_type, static_cast<Py_ssize_t>(fields.size())));  // as tuple.__new__ does
  Py_ssize_t at = 0;
  for (PyObject* field : fields)
    if (values) PyTuple_SET_ITEM(values.get(), at++, Py_NewRef(field));
  return values;
}

bool give(Results& made, const std::vector<Object*>& owners) {
  for (size_t at = 0; at < owners.size(); ++at)
    if (owners[at] != nullptr && !(*owners[at] = made.object(at))) return false;
  return true;
}

bool make_parts(Results& made, std::vector<Object*>& owners, const std::vector<Part>& parts, bool is_shared) {
  static const int32_t int32 = dtype_number("int32");
  const size_t block = made.size();
  Address base = 0;
  int64_t words = 0;
  for (const Part& part : parts) words += aligned(part.rows * std::max<int64_t>(part.columns, 1));
  if (is_shared) {
    if (!made.empty({words}, int32, &base)) return false;
    owners.push_back(nullptr);
  }
  int64_t begin = 0;
  for (const Part& part : parts) {
    Address address = base + 4 * begin;
    const auto add = [&](std::initializer_list<int64_t> sizes) {
      return is_shared ? made.view(block, sizes, begin) : made.empty(sizes, int32, &address);
    };
    if (part.owner != nullptr) {
      if (!(part.columns == 0 ? add({part.rows}) : add({part.rows, part.columns}))) return false;
      owners.push_back(part.owner);
    }
    begin += aligned(part.rows * std::max<int64_t>(part.columns, 1));
    if (part.address != nullptr) *part.address = address;
  }
  return true;
}

bool append_key(std::string& form, Door door, const Settings& settings) {
  form += door == Door::kBuffer ? 'b' : 'c';
  for (Py_ssize_t i = 0; i < settings.count; ++i) {
    PyObject* value = settings.values[i];
    if (value == Py_None) {
      form += 'n';
    } else if (PyBool_Check(value)) {
      form += value == Py_True ? 't' : 'f';
    } else if (PyLong_CheckExact(value)) {
      int overflow = 0;
      const int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
      if (overflow != 0) return false;
      form.append(1, 'i').append(reinterpret_cast<const char*>(&number), sizeof(number));
    } else {
      Py_ssize_t size = 0;
      const char* text = PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
      PyErr_Clear();  // of text that cannot be encoded
      if (text == nullptr) return false;
      form.append(1, 's').append(reinterpret_cast<const char*>(&size), sizeof(size)).append(text, size);
    }
  }
  return true;
}

bool Operation::read(Inputs& inputs, std::initializer_list<std::pair<PyObject*, DLTensor*>> tensors, RowsInForm rows) {
  for (const auto& [object, tensor] : tensors) {
    if (!inputs.read(object, rows)) return false;
    *tensor = inputs.last();
    if (object != Py_None) inputs_.push_back(Object::borrowed(object));
  }
  return door_ != Door::kCommunicator || !inputs.needs_grad();
}

Address Operation::hold(Object tensor) {
  DLTensor found{};
  if (exchange_api()->from_object(tensor.get(), &found) != 0) return 0;
  inputs_.push_back(std::move(tensor));
  return address_of(found);
}

bool Operation::needs_grad() const {
  if (door_ == Door::kBuffer || !torch_functions().aoti_torch_grad_mode_is_enabled()) return false;
  for (const Object& input : inputs_)
    if (descriptors().requires_grad.of(input.get()).get() != Py_False) return true;
  return false;
}

Object Operation::tensors() const {
  const Object made = results();
  Object all(PyTuple_New(static_cast<Py_ssize_t>(inputs_.size())));
  if (!made || !all) return Object();
  for (size_t i = 0; i < inputs_.size(); ++i)
    PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i), Py_NewRef(inputs_[i].get()));
  return Object(PySequence_Concat(all.get(), made.get()));
}

}  // namespace ep::control
