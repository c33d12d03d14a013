#include "control/inputs.h"

#include "common/layout.h"

namespace ep::control {

namespace {

// The beginning of a tensor's part of a form. Its sizes and then its strides follow. The struct has no padding, because
// forms are compared byte by byte.
struct Head {
  int32_t dtype;     // PyTorch's number. DLPack knows fewer dtypes
  int32_t num_dims;  // -1: no tensor
  int32_t device_type, device_id;
  int32_t misaligned;  // bytes past a multiple of kRowAlign
};
static_assert(sizeof(Head) == 5 * sizeof(int32_t), "no padding");

}  // namespace

// Whether the storage of the last tensor, which has at least one element, holds all of them. A storage that was freed
// or resized may not.
bool Inputs::holds_all(TensorHandle tensor) {
  int64_t last = 0, offset = 0;
  for (int i = 0; i < last_.num_dims; ++i) last += (last_.shape[i] - 1) * last_.strides[i];
  if (torch_functions().aoti_torch_get_storage_offset(tensor, &offset) != 0 ||
      torch_functions().aoti_torch_get_storage_size(tensor, &storage_bytes_) != 0)
    return false;
  begin_ = offset * last_.type_bits / 8;
  return begin_ + (last + 1) * last_.type_bits / 8 <= storage_bytes_;
}

bool Inputs::append(PyObject* object, RowsInForm rows) {
  const TensorDescriptors& ask = descriptors();
  last_ = DLTensor{};
  if (object == Py_None) {
    const Head head{0, -1, 0, 0, 0};
    form_.append(reinterpret_cast<const char*>(&head), sizeof(head));
    return true;
  }
  if (exchange_api() == nullptr || !is_plain(object)) return false;
  if (exchange_api()->from_object(object, &last_) != 0) return false;  // for instance, the tensor has no memory
  if (last_.type_code == kDLComplex || last_.type_lanes != 1) return false;
  if (ask.is_neg.of(object).get() != Py_False) return false;
  bool is_empty = false;
  for (int i = 0; i < last_.num_dims; ++i) is_empty |= last_.shape[i] == 0;
  int32_t dtype = 0;
  const bool is_read = !is_empty && rows != kUnread;
  const auto ask_for_rest = [&](TensorHandle tensor) {
    return torch_functions().aoti_torch_get_dtype(tensor, &dtype) == 0 &&
           (!is_read || (last_.data != nullptr && holds_all(tensor)));
  };
  if (!with_handle(object, ask_for_rest)) return false;
  const uint8_t type = last_.type_code;
  const bool may_have_gradient = type != kDLSigned && type != kDLUnsigned && type != kDLBool;
  if (may_have_gradient && torch_functions().aoti_torch_grad_mode_is_enabled())
    needs_grad_ |= ask.requires_grad.of(object).get() != Py_False;
  if (PyErr_Occurred()) return false;
  const auto misaligned = static_cast<int32_t>(address_of(last_) % kRowAlign);
  const Head head{dtype, last_.num_dims, last_.device_type, last_.device_id, misaligned};
  form_.append(reinterpret_cast<const char*>(&head), sizeof(head));
  const size_t at_shape = form_.size();
  form_.append(reinterpret_cast<const char*>(last_.shape), last_.num_dims * sizeof(int64_t));
  // Strides say nothing about a tensor of fewer rows.
  if (rows == kFreeRows && last_.num_dims > 0 && last_.shape[0] > 1) form_.replace(at_shape, sizeof(int64_t), 8, '*');
  form_.append(reinterpret_cast<const char*>(last_.strides), last_.num_dims * sizeof(int64_t));
  return true;
}

}  // namespace ep::control
