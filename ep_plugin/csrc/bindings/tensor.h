// Memory as a tensor that PyTorch can take over.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "common/dlpack.h"
#include "common/views.h"

namespace ep {

// Returns a capsule for torch.from_dlpack: uint8 [bytes] at `address`, in the memory of GPU `device`, or of the host if
// `device` is negative. The tensor's storage keeps `owner` alive.
inline pybind11::capsule dlpack_bytes(Address address, int64_t bytes, int device, pybind11::object owner) {
  struct Export {
    DLManagedTensor tensor;
    int64_t bytes;
    PyObject* owner;
  };
  const DLTensor tensor{
      at<void>(address), device < 0 ? kDLCpu : kDLCuda, std::max(device, 0), 1, kDLUnsigned, 8, 1, nullptr, nullptr, 0};
  auto* exported = new Export{{tensor, nullptr, nullptr}, bytes, owner.release().ptr()};
  exported->tensor.tensor.shape = &exported->bytes;
  exported->tensor.manager = exported;
  exported->tensor.deleter = [](DLManagedTensor* self) {
    auto* exported = static_cast<Export*>(self->manager);
    if (Py_IsInitialized()) {  // otherwise the process is ending
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
