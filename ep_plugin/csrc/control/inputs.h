// The tensors of one call: their form, and their addresses.
//
// A form is everything that kernels must know about tensors except their addresses and values, as bytes. Calls of equal
// form and settings need one check of their arguments in Python.
#pragma once
#include <string>
#include <utility>

#include "control/torch_c.h"

namespace ep::control {

// kFreeRows: tensors of two rows or more have one form whatever their number of rows. kUnread: the tensor's values are
// not used, so its storage may have been freed.
enum RowsInForm { kFixedRows, kFreeRows, kUnread };

class Inputs {
 public:
  Inputs() { form_.reserve(512); }

  // Appends a tensor or None. Returns false if it has no form: its type stands for other tensors, its values are not as
  // they lie in memory, or its storage is too small. Python's error is set only if a signal's handler has raised it.
  bool read(PyObject* object, RowsInForm rows = kFixedRows) {
    const bool is_read = append(object, rows);
    if (!is_read && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
    return is_read;
  }

  // Whether a tensor read so far requires a gradient that autograd would record now.
  bool needs_grad() const { return needs_grad_; }
  const std::string& form() const { return form_; }
  // Gives the form to the caller.
  std::string take_form() { return std::move(form_); }
  // The tensor read last. Its sizes are PyTorch's own, and hold until the tensor changes. All 0 for None.
  const DLTensor& last() const { return last_; }
  // Where that tensor begins in its storage, and the size of the storage, in bytes. It must have an element.
  int64_t begin() const { return begin_; }
  int64_t storage_bytes() const { return storage_bytes_; }

 private:
  bool append(PyObject* object, RowsInForm rows);
  bool holds_all(TensorHandle tensor);

  std::string form_;
  DLTensor last_;
  int64_t begin_ = 0, storage_bytes_ = 0;
  bool needs_grad_ = false;
};

inline Address address_of(const DLTensor& tensor) { return reinterpret_cast<Address>(tensor.data); }
inline int64_t bytes_of(const DLTensor& tensor) {
  int64_t elements = 1;
  for (int i = 0; i < tensor.num_dims; ++i) elements *= tensor.shape[i];
  return elements * tensor.type_bits / 8;
}

}  // namespace ep::control
