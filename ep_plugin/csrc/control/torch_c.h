// PyTorch as the host path uses it: C functions of the loaded libtorch, found by name, and the table with which its
// tensor class exchanges DLPack tensors. So one extension file serves every PyTorch from 2.11 on.
#pragma once
#include <Python.h>

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "common/api.h"
#include "common/dlpack.h"

namespace ep::control {

// A reference to an object of Python, or none. It needs the interpreter's lock.
class Object {
 public:
  Object() = default;
  explicit Object(PyObject* owned) : object_(owned) {}
  Object(const Object& other) : object_(Py_XNewRef(other.object_)) {}
  Object(Object&& other) noexcept : object_(other.release()) {}
  Object& operator=(Object other) {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Object() { Py_XDECREF(object_); }

  static Object borrowed(PyObject* object) { return Object(Py_XNewRef(object)); }
  PyObject* get() const { return object_; }
  // Gives the reference to the caller.
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Returns Python's string for a name in this code. It lives as long as the process.
inline PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

// Calls a method. Null with Python's error set.
template <class... Args>
Object call(PyObject* object, PyObject* method, Args... args) {
  PyObject* const given[] = {object, args...};
  return Object(PyObject_VectorcallMethod(method, given, std::size(given), nullptr));
}

// A method without arguments, or an attribute, of a class that C has made. Python's interpreter would find it by its
// name at every call.
class Descriptor {
 public:
  // Finds it. Returns false with Python's error set.
  bool find(PyObject* type, const char* name);
  // Returns what the method returns, or the attribute's value, of an object of the class. Null with Python's error set.
  Object of(PyObject* object) const;
  // Sets `value` to that number. Returns false with Python's error set.
  bool number_of(PyObject* object, int64_t* value) const;

 private:
  PyObject* descriptor_ = nullptr;
  PyCFunction method_ = nullptr;
  getter get_ = nullptr;
  void* closure_ = nullptr;
};

// The methods and attributes of tensors that C reads.
struct TensorDescriptors {
  Descriptor is_neg, dtype, requires_grad, untyped_storage;
  Descriptor implementation;  // `_cdata`, the address of PyTorch's object
};
const TensorDescriptors& descriptors();

struct TensorOpaque;
using TensorHandle = TensorOpaque*;  // AtenTensorHandle: a tensor that its holder must delete

// Members have the names of PyTorch's functions. Functions return 0, or another number after an error.
// tests/project/test_torch_c.py compares them with the headers of PyTorch.
struct TorchFunctions {
  int32_t (*aoti_torch_empty_strided)(int64_t ndim, const int64_t* sizes_ptr, const int64_t* strides_ptr, int32_t dtype,
                                      int32_t device_type, int32_t device_index, TensorHandle* ret_new_tensor);
  int32_t (*aoti_torch__reinterpret_tensor)(TensorHandle self, int64_t ndim, const int64_t* sizes_ptr,
                                            const int64_t* strides_ptr, int64_t storage_offset,
                                            TensorHandle* ret_new_tensor);
  int32_t (*aoti_torch_get_data_ptr)(TensorHandle tensor, void** ret_data_ptr);
  int32_t (*aoti_torch_delete_tensor_object)(TensorHandle tensor);
  int32_t (*aoti_torch_get_dtype)(TensorHandle tensor, int32_t* ret_dtype);
  int32_t (*aoti_torch_get_storage_offset)(TensorHandle tensor, int64_t* ret_storage_offset);
  int32_t (*aoti_torch_get_storage_size)(TensorHandle tensor, int64_t* ret_size);
  bool (*aoti_torch_grad_mode_is_enabled)();
  // From PyTorch 2.14 on. Before, a function of our own that does the same.
  int32_t (*torch_tensor_to_pyobject)(TensorHandle ath, void* py_type, void** ret);
};

enum TorchDevice : int32_t { kTorchCpu = 0, kTorchCuda = 1 };

const TorchFunctions& torch_functions();
// PyTorch's table, of version 1. Null before find_torch().
const DLExchangeApi* exchange_api();

// Calls function(handle) with the handle of the tensor that `object` is, for that time. Returns false, maybe with
// Python's error set, if `object` is no tensor.
template <class Function>
bool with_handle(PyObject* object, const Function& function) {
  int64_t implementation = 0;  // a handle is the address of an at::Tensor, and that is one pointer
  return descriptors().implementation.number_of(object, &implementation) &&
         function(reinterpret_cast<TensorHandle>(&implementation));
}

// Finds all of it. torch: the module. Returns false with Python's error set if a function is missing.
bool find_torch(PyObject* torch);

// Returns PyTorch's number of a dtype, named as in "bfloat16". -1: PyTorch has no function for it.
int32_t dtype_number(const std::string& name);
inline int32_t float32_number() {
  static const int32_t number = dtype_number("float32");
  return number;
}

// Whether `object` is a torch.Tensor or a Parameter itself, no subclass. Its value is then its memory.
bool is_plain(PyObject* object);

// Whether a mode, a transform, a profiler or forward-mode differentiation must see a call's operators; also if Python
// fails to say so, with its error set.
bool is_watched();

// Sets PyTorch's current stream on the current GPU. Returns false, maybe with Python's error set, if that has another
// number.
bool torch_stream(int device_index, uint64_t* stream);

// New tensors of one device. It deletes them. Their objects stay.
class Results {
 public:
  Results(int32_t device_type, int32_t device_index);
  ~Results();
  Results(const Results&) = delete;
  Results& operator=(const Results&) = delete;

  // Each adds a tensor. Returns false with Python's error set.
  // `strides` may be null: contiguous. Deterministic algorithms may ask PyTorch to fill the tensor.
  bool empty(std::initializer_list<int64_t> sizes, int32_t dtype, Address* address, const int64_t* strides = nullptr);
  // A contiguous view of the tensor `of`, from the element `begin` on.
  bool view(size_t of, std::initializer_list<int64_t> sizes, int64_t begin);
  size_t size() const { return held_.size(); }
  // Whether PyTorch's kernels fill the tensors, as with deterministic algorithms.
  bool are_filled() const { return must_fill_; }
  // Returns the tensor's object. None with Python's error set.
  Object object(size_t at);

 private:
  TensorHandle made_by_python(size_t num_dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) const;

  const int32_t type_, index_;
  const bool must_fill_;
  std::vector<TensorHandle> held_;
};

}  // namespace ep::control
