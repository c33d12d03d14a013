#include "control/torch_c.h"

#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <map>

namespace ep::control {

namespace {

constexpr uint32_t kMajor = 1;  // the major version of DLPack
constexpr char kLibrary[] = "libtorch_cpu.so", kPythonLibrary[] = "libtorch_python.so";

TorchFunctions functions{};
TensorDescriptors found_descriptors{};
void* library = nullptr;
PyObject* torch_module = nullptr;
const DLExchangeApi* api = nullptr;
// Python's objects live as long as the process.
PyObject *tensor_type = nullptr, *parameter_type = nullptr, *release = nullptr, *empty_strided = nullptr,
         *num_modes = nullptr, *transforms = nullptr, *is_profiling = nullptr, *is_deterministic = nullptr,
         *forward_ad = nullptr, *level_name = nullptr,
         *current_device = nullptr;   // null in PyTorch's builds for CPUs
std::map<int32_t, PyObject*> dtypes;  // torch's objects, by number

template <class Function>
bool find(const char* name, Function& function, const char* of = kLibrary) {
  void* const loaded = of == kLibrary ? library : dlopen(of, RTLD_NOW | RTLD_NOLOAD);
  function = loaded == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(loaded, name));
  if (function != nullptr) return true;
  PyErr_Format(PyExc_ImportError, "expected the function %s in %s, found none; ep_plugin needs PyTorch 2.11 or newer",
               name, of);
  return false;
}

// Returns the attribute at a path such as {"_C", "_aoti"}; null with Python's error set.
PyObject* attribute(PyObject* object, std::initializer_list<const char*> path) {
  Object found = Object::borrowed(object);
  for (const char* name : path)
    if (found) found = Object(PyObject_GetAttrString(found.get(), name));
  return found.release();
}

bool find_descriptors(PyObject* torch) {
  const Object tensor(attribute(torch, {"Tensor"}));
  TensorDescriptors& found = found_descriptors;
  return tensor && found.is_neg.find(tensor.get(), "is_neg") && found.dtype.find(tensor.get(), "dtype") &&
         found.requires_grad.find(tensor.get(), "requires_grad") &&
         found.untyped_storage.find(tensor.get(), "untyped_storage") &&
         found.implementation.find(tensor.get(), "_cdata");
}

bool find_objects(PyObject* torch) {
  tensor_type = attribute(torch, {"Tensor"});
  parameter_type = attribute(torch, {"nn", "Parameter"});
  release = attribute(torch, {"_C", "_aoti", "unsafe_alloc_void_ptrs_from_tensors"});
  empty_strided = attribute(torch, {"empty_strided"});
  num_modes = attribute(torch, {"_C", "_len_torch_dispatch_stack"});
  transforms = attribute(torch, {"_C", "_functorch", "peek_interpreter_stack"});
  is_profiling = attribute(torch, {"_C", "_autograd", "_profiler_enabled"});
  is_deterministic = attribute(torch, {"_C", "_get_deterministic_algorithms"});
  forward_ad = attribute(torch, {"autograd", "forward_ad"});
  level_name = PyUnicode_InternFromString("_current_level");
  if (PyErr_Occurred()) return false;
  current_device = attribute(torch, {"_C", "_cuda_getDevice"});
  PyErr_Clear();
  return true;
}

bool find_api() {
  const Object capsule(PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__"));
  if (capsule) api = static_cast<const DLExchangeApi*>(PyCapsule_GetPointer(capsule.get(), kDLExchangeApiName));
  while (api != nullptr && api->major != kMajor) api = api->previous;
  if (api != nullptr) return true;
  PyErr_Format(PyExc_ImportError,
               "expected %s of version 1 in torch.Tensor, found none; ep_plugin needs PyTorch 2.11 or newer",
               kDLExchangeApiName);
  return false;
}

// THPVariable_Wrap(const at::TensorBase&) of PyTorch 2.11 to 2.13: the object of a tensor. Null with Python's error
// set.
PyObject* (*wrap)(TensorHandle) = nullptr;

int32_t wrap_tensor(TensorHandle tensor, void*, void** made) {
  try {
    *made = wrap(tensor);
  } catch (const std::exception&) {  // Python's error is set, or there is no memory
    *made = nullptr;
  }
  return *made == nullptr ? 1 : 0;
}

bool find_to_object() {
  auto& to_object = functions.torch_tensor_to_pyobject;
  to_object = reinterpret_cast<decltype(+to_object)>(dlsym(library, "torch_tensor_to_pyobject"));
  if (to_object != nullptr) return true;
  to_object = &wrap_tensor;
  return find("_Z16THPVariable_WrapRKN2at10TensorBaseE", wrap, kPythonLibrary);
}

// The strides of a contiguous tensor of up to 4 dimensions.
struct Strides {
  int64_t of[4];

  explicit Strides(std::initializer_list<int64_t> sizes) {
    int64_t next = 1;
    for (size_t dim = sizes.size(); dim-- > 0;) {
      of[dim] = next;
      next *= std::max<int64_t>(sizes.begin()[dim], 1);
    }
  }
};

// Sets Python's error for functions of PyTorch that fail for no other reason.
bool out_of_memory() {
  PyErr_NoMemory();
  return false;
}

}  // namespace

bool Descriptor::find(PyObject* type, const char* name) {
  descriptor_ = PyObject_GetAttrString(type, name);
  if (descriptor_ == nullptr) return false;
  if (Py_IS_TYPE(descriptor_, &PyMethodDescr_Type)) {
    const PyMethodDef& method = *reinterpret_cast<PyMethodDescrObject*>(descriptor_)->d_method;
    if (method.ml_flags == METH_NOARGS) method_ = method.ml_meth;
  } else if (Py_IS_TYPE(descriptor_, &PyGetSetDescr_Type)) {
    const PyGetSetDef& attribute = *reinterpret_cast<PyGetSetDescrObject*>(descriptor_)->d_getset;
    get_ = attribute.get;
    closure_ = attribute.closure;
  }
  return true;
}

Object Descriptor::of(PyObject* object) const {
  if (method_ != nullptr) return Object(method_(object, nullptr));
  if (get_ != nullptr) return Object(get_(object, closure_));
  static PyObject* const get = interned("__get__");
  const Object bound(call(descriptor_, get, object));
  return bound && PyCallable_Check(bound.get()) ? Object(PyObject_CallNoArgs(bound.get())) : bound;
}

bool Descriptor::number_of(PyObject* object, int64_t* value) const {
  const Object found = of(object);
  if (!found) return false;
  *value = PyLong_AsLongLong(found.get());
  return !PyErr_Occurred();
}

const TensorDescriptors& descriptors() { return found_descriptors; }
const TorchFunctions& torch_functions() { return functions; }
const DLExchangeApi* exchange_api() { return api; }

bool find_torch(PyObject* torch) {
  torch_module = torch;
  library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    PyErr_Format(PyExc_ImportError, "expected %s to be loaded by PyTorch, found none", kLibrary);
    return false;
  }
  return find_to_object() && find("aoti_torch_empty_strided", functions.aoti_torch_empty_strided) &&
         find("aoti_torch__reinterpret_tensor", functions.aoti_torch__reinterpret_tensor) &&
         find("aoti_torch_get_data_ptr", functions.aoti_torch_get_data_ptr) &&
         find("aoti_torch_delete_tensor_object", functions.aoti_torch_delete_tensor_object) &&
         find("aoti_torch_get_dtype", functions.aoti_torch_get_dtype) &&
         find("aoti_torch_get_storage_offset", functions.aoti_torch_get_storage_offset) &&
         find("aoti_torch_get_storage_size", functions.aoti_torch_get_storage_size) &&
         find("aoti_torch_grad_mode_is_enabled", functions.aoti_torch_grad_mode_is_enabled) && find_objects(torch) &&
         find_descriptors(torch) && find_api();
}

int32_t dtype_number(const std::string& name) {
  const auto find_number = reinterpret_cast<int32_t (*)()>(dlsym(library, ("aoti_torch_dtype_" + name).c_str()));
  if (find_number == nullptr) return -1;
  const int32_t number = find_number();
  if (dtypes.count(number) == 0) dtypes[number] = attribute(torch_module, {name.c_str()});
  return number;
}

bool is_plain(PyObject* object) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == tensor_type || type == parameter_type;
}

bool is_watched() {
  for (PyObject* ask : {num_modes, is_profiling}) {
    const Object said(PyObject_CallNoArgs(ask));
    if (!said || PyObject_IsTrue(said.get()) != 0) return true;
  }
  const Object top(PyObject_CallNoArgs(transforms)), level(PyObject_GetAttr(forward_ad, level_name));
  return top.get() != Py_None || !level || PyLong_AsLongLong(level.get()) >= 0;
}

bool torch_stream(int device_index, uint64_t* stream) {
  const Object current(current_device == nullptr ? nullptr : PyObject_CallNoArgs(current_device));
  void* found = nullptr;
  if (!current || PyLong_AsLongLong(current.get()) != device_index ||
      api->current_stream(kDLCuda, device_index, &found) != 0)
    return false;
  *stream = reinterpret_cast<uint64_t>(found);
  return true;
}

Results::Results(int32_t device_type, int32_t device_index)
    : type_(device_type),
      index_(device_index),
      must_fill_(Object(PyObject_CallNoArgs(is_deterministic)).get() != Py_False) {
  held_.reserve(8);
}

Results::~Results() {
  for (TensorHandle handle : held_) functions.aoti_torch_delete_tensor_object(handle);
}

bool Results::empty(std::initializer_list<int64_t> sizes, int32_t dtype, Address* address, const int64_t* strides) {
  const Strides contiguous(sizes);
  if (strides == nullptr) strides = contiguous.of;
  TensorHandle made = nullptr;
  void* data = nullptr;
  if (must_fill_ ||
      functions.aoti_torch_empty_strided(sizes.size(), sizes.begin(), strides, dtype, type_, index_, &made) != 0)
    made = made_by_python(sizes.size(), sizes.begin(), strides, dtype);
  if (made == nullptr) return false;
  held_.push_back(made);
  if (functions.aoti_torch_get_data_ptr(made, &data) != 0) return out_of_memory();
  *address = reinterpret_cast<Address>(data);
  return true;
}

// Returns a tensor that PyTorch's own function makes: it fills the memory if it must, and raises its own errors. Null
// with Python's error set.
TensorHandle Results::made_by_python(size_t num_dims, const int64_t* sizes, const int64_t* strides,
                                     int32_t dtype) const {
  const Object shape(PyTuple_New(num_dims)), steps(PyTuple_New(num_dims)), keywords(PyDict_New());
  if (!shape || !steps || !keywords || PyErr_Occurred()) return nullptr;
  for (size_t i = 0; i < num_dims; ++i) {
    PyTuple_SET_ITEM(shape.get(), i, PyLong_FromLongLong(sizes[i]));
    PyTuple_SET_ITEM(steps.get(), i, PyLong_FromLongLong(strides[i]));
  }
  const Object device(type_ == kTorchCpu ? PyUnicode_FromString("cpu") : PyUnicode_FromFormat("cuda:%d", index_));
  const Object given(PyTuple_Pack(2, shape.get(), steps.get()));
  if (!device || !given || PyDict_SetItemString(keywords.get(), "dtype", dtypes.at(dtype)) != 0 ||
      PyDict_SetItemString(keywords.get(), "device", device.get()) != 0)
    return nullptr;
  const Object made(PyObject_Call(empty_strided, given.get(), keywords.get()));
  const Object list(made ? PyList_New(1) : nullptr);
  if (!list) return nullptr;
  PyList_SET_ITEM(list.get(), 0, Py_NewRef(made.get()));
  const Object handles(PyObject_CallOneArg(release, list.get()));
  return handles ? static_cast<TensorHandle>(PyCapsule_GetPointer(PyList_GET_ITEM(handles.get(), 0), nullptr))
                 : nullptr;
}

bool Results::view(size_t of, std::initializer_list<int64_t> sizes, int64_t begin) {
  TensorHandle made = nullptr;
  if (functions.aoti_torch__reinterpret_tensor(held_[of], sizes.size(), sizes.begin(), Strides(sizes).of, begin,
                                               &made) != 0)
    return out_of_memory();
  held_.push_back(made);
  return true;
}

Object Results::object(size_t at) {
  void* object = nullptr;
  if (functions.torch_tensor_to_pyobject(held_[at], nullptr, &object) != 0 && !PyErr_Occurred()) out_of_memory();
  return Object(static_cast<PyObject*>(object));
}

}  // namespace ep::control
