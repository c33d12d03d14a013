// Tensors as C structures: DLPack 1.x (dmlc.github.io/dlpack), which PyTorch exports and takes over.
#pragma once
#include <cstdint>

namespace ep {

enum DLDeviceType : int32_t { kDLCpu = 1, kDLCuda = 2 };
enum DLTypeCode : uint8_t { kDLSigned = 0, kDLUnsigned = 1, kDLComplex = 5, kDLBool = 6 };

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t num_dims;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor tensor;
  void* manager;
  void (*deleter)(DLManagedTensor*);
};

// A framework's tensor class has this table as __dlpack_c_exchange_api__, in a capsule of this name. Later versions of
// the same major version add fields at the end.
inline constexpr char kDLExchangeApiName[] = "dlpack_exchange_api";
struct DLExchangeApi {
  uint32_t major, minor;
  const DLExchangeApi* previous;  // the table of an older major version, or null
  void* allocate;
  void* managed_from_object;
  void* object_from_managed;
  // Describes a tensor object without a reference to it. Returns 0, or -1 with Python's error set.
  int (*from_object)(void* object, DLTensor* out);
  // Sets `out` to the caller's current stream on a device. Returns 0, or -1 with Python's error set.
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace ep
