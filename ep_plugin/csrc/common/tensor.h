// Memory as a tensor that PyTorch can take over: DLPack's C structures (dmlc.github.io/dlpack, version 0.8).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "common/views.h"

namespace ep {

struct DLManagedTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t num_dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
  void* manager;
  void (*deleter)(DLManagedTensor*);
};

// Returns a capsule for torch.from_dlpack: uint8 [bytes] at `address`, in the memory of GPU `device`, or of the host if
// `device` is negative. The tensor's storage keeps `owner` alive.
inline pybind11::capsule dlpack_bytes(Address address, int64_t bytes, int device, pybind11::object owner) {
  constexpr int kHost = 1, kCuda = 2, kUnsigned = 1;
  struct Export {
    DLManagedTensor tensor;
    int64_t bytes;
    PyObject* owner;
  };
  auto* exported = new Export{{at<void>(address), device < 0 ? kHost : kCuda, device < 0 ? 0 : device, 1, kUnsigned, 8,
                               1, nullptr, nullptr, 0, nullptr, nullptr},
                              bytes,
                              owner.release().ptr()};
  exported->tensor.shape = &exported->bytes;
  exported->tensor.manager = exported;
  exported->tensor.deleter = [](DLManagedTensor* self) {
    auto* exported = static_cast<Export*>(self->manager);
    if (Py_IsInitialized()) {  // else the process is ending
      const PyGILState_STATE locked = PyGILState_Ensure();
      Py_DECREF(exported->owner);
      PyGILState_Release(locked);
    }
    delete exported;
  };
  // PyTorch renames a capsule that it has taken, and calls the deleter itself. A capsule that nobody took calls it
  // here.
  return pybind11::capsule(&exported->tensor, "dltensor", [](PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, "dltensor")) {
      auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
      tensor->deleter(tensor);
    }
  });
}

}  // namespace ep
