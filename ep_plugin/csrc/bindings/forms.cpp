// The form of a call's tensors: everything that kernels must know about them except their addresses.
#include "bindings/bind.h"
#include "common/dlpack.h"

namespace ep::bindings {

namespace {

constexpr uint32_t kMajor = 1;  // the major version of DLPack

// PyTorch's functions, after `read_tensors` has named them. They live as long as the process.
const DLExchangeApi* api = nullptr;
PyObject *tensor_type = nullptr, *parameter_type = nullptr;

// The beginning of a tensor's part of a form. Its sizes and then its strides follow. The struct has no padding, because
// forms are compared byte by byte.
struct Head {
  PyObject* dtype;   // PyTorch's object. DLPack knows fewer dtypes
  int32_t num_dims;  // -1: no tensor
  int32_t device_type, device_id;
  int32_t misaligned;  // bytes past a multiple of kRowAlign
};
static_assert(sizeof(Head) == sizeof(PyObject*) + 4 * sizeof(int32_t), "no padding");

PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

py::object call(PyObject* object, PyObject* method) {
  auto found = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object, method));
  if (!found) throw py::error_already_set();
  return found;
}

int64_t int_of(const py::object& object, PyObject* method) {
  const int64_t value = PyLong_AsLongLong(call(object.ptr(), method).ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// Whether the storage of `object` holds all elements of `tensor`, which has at least one. A storage that was freed or
// resized may not.
bool holds_all(PyObject* object, const DLTensor& tensor) {
  static PyObject *const storage_name = interned("untyped_storage"), *const nbytes_name = interned("nbytes"),
                         *const address_name = interned("data_ptr");
  int64_t last = 0;
  for (int i = 0; i < tensor.num_dims; ++i) last += (tensor.shape[i] - 1) * tensor.strides[i];
  const py::object storage = call(object, storage_name);
  const int64_t begin = reinterpret_cast<Address>(tensor.data) - int_of(storage, address_name);
  return begin + (last + 1) * tensor.type_bits / 8 <= int_of(storage, nbytes_name);
}

void append(std::string& form, const void* from, size_t bytes) { form.append(static_cast<const char*>(from), bytes); }

// Appends the form of a tensor. Returns whether it has one.
bool append_form(std::string& form, PyObject* object) {
  static PyObject *const is_neg_name = interned("is_neg"), *const dtype_name = interned("dtype");
  if (object == Py_None) {
    const Head head{nullptr, -1, 0, 0, 0};
    append(form, &head, sizeof(head));
    return true;
  }
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != tensor_type && type != parameter_type) return false;
  DLTensor tensor;
  if (api->from_object(object, &tensor) != 0) throw py::error_already_set();  // for instance, the tensor has no memory
  if (tensor.type_code == kDLComplex || tensor.type_lanes != 1) return false;
  if (call(object, is_neg_name).ptr() != Py_False) return false;
  bool is_empty = false;
  for (int i = 0; i < tensor.num_dims; ++i) is_empty |= tensor.shape[i] == 0;
  if (!is_empty && (tensor.data == nullptr || !holds_all(object, tensor))) return false;
  const auto dtype = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, dtype_name));
  if (!dtype) throw py::error_already_set();
  const auto misaligned = static_cast<int32_t>(reinterpret_cast<uintptr_t>(tensor.data) % kRowAlign);
  const Head head{dtype.ptr(), tensor.num_dims, tensor.device_type, tensor.device_id, misaligned};
  append(form, &head, sizeof(head));
  append(form, tensor.shape, tensor.num_dims * sizeof(int64_t));
  append(form, tensor.strides, tensor.num_dims * sizeof(int64_t));
  return true;
}

}  // namespace

Address address_of(py::handle tensor) {
  if (tensor.is_none()) return 0;
  const PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  if (api == nullptr || (type != tensor_type && type != parameter_type))
    return tensor.attr("data_ptr")().cast<Address>();
  DLTensor found;
  if (api->from_object(tensor.ptr(), &found) != 0) throw py::error_already_set();
  return reinterpret_cast<Address>(found.data);
}

void bind_forms(py::module_& m) {
  m.def("read_tensors", [](const py::object& exchange_api, const py::object& tensor, const py::object& parameter) {
    auto* found = static_cast<const DLExchangeApi*>(PyCapsule_GetPointer(exchange_api.ptr(), kDLExchangeApiName));
    if (found == nullptr) throw py::error_already_set();
    while (found != nullptr && found->major != kMajor) found = found->previous;
    api = found;
    tensor_type = py::object(tensor).release().ptr();
    parameter_type = py::object(parameter).release().ptr();
  });
  m.def("form_of", [](const py::args& tensors) -> py::object {
    if (api == nullptr) return py::none();
    std::string form;
    form.reserve(512);
    try {
      for (py::handle tensor : tensors)
        if (!append_form(form, tensor.ptr())) return py::none();
    } catch (const py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // such as Ctrl-C
      return py::none();
    }
    return py::bytes(form);
  });
}

}  // namespace ep::bindings
