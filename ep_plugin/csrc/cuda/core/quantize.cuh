// Quantises rows to e4m3 while they are sent: from memory, through registers, into slots or into the stages from which
// slots are stored. common/fp8.h defines the arithmetic.
//
// Roles. A warp quantises one row. Each lane handles several 16-byte vectors at a time, and loads the next ones
// meanwhile. The lanes that share a scale block compute its maximum together. Each lane computes the scale of one block
// and shares it by a shuffle.
// Buffers. Only the result has a stage in shared memory. Without a stage for the input, more warps fit.
// Memory order. All lanes fence the async proxy after they have written a stage, before lane 0 stores it in bulk.
#pragma once
#include "common/fp8.h"
#include "cuda/core/copy.cuh"
#include "cuda/core/element.cuh"

namespace ep::cuda {

constexpr int kVectorsQuantized = 8;  // vectors that a lane quantises at a time

// Splits a vector of 16 bytes into magnitudes, and signs: the highest bit of each byte of a word.
template <class Pair>
struct FromSixteenBit {
  static constexpr int kPerVector = 8;
  static __device__ __forceinline__ void magnitudes(int4 vector, float* to) {
    const int32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Pair::widen(words[i] & 0x7FFF7FFF);
      to[2 * i] = pair.x;
      to[2 * i + 1] = pair.y;
    }
  }
  // The signs of elements 4 * word to 4 * word + 3.
  static __device__ __forceinline__ uint32_t signs(int4 vector, int word) {
    return word == 0 ? __byte_perm(vector.x, vector.y, 0x7531) : __byte_perm(vector.z, vector.w, 0x7531);
  }
};
using FromBFloat16 = FromSixteenBit<BFloat16Pair>;
using FromFloat16 = FromSixteenBit<Float16Pair>;

struct FromFloat32 {
  static constexpr int kPerVector = 4;
  static __device__ __forceinline__ void magnitudes(int4 vector, float* to) {
    to[0] = __int_as_float(vector.x & 0x7FFFFFFF);
    to[1] = __int_as_float(vector.y & 0x7FFFFFFF);
    to[2] = __int_as_float(vector.z & 0x7FFFFFFF);
    to[3] = __int_as_float(vector.w & 0x7FFFFFFF);
  }
  static __device__ __forceinline__ uint32_t signs(int4 vector, int) {
    return __byte_perm(__byte_perm(vector.x, vector.y, 0x73), __byte_perm(vector.z, vector.w, 0x73), 0x5410);
  }
};

// Computes kVectorsQuantized maxima over groups of kLanes lanes; `held[i]` is this lane's value for maximum i. A lane
// returns maximum lane % kVectorsQuantized. In each exchange a lane passes on half of its values. `held` is
// overwritten.
template <int kLanes>
__device__ __forceinline__ float shared_maximum(float* held) {
  static_assert(kLanes >= kVectorsQuantized, "each vector needs a lane");
#pragma unroll
  for (int half = kVectorsQuantized / 2; half > 0; half /= 2) {
    const bool upper = (lane_id() & half) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? held[i + half] : held[i], given = upper ? held[i] : held[i + half];
      held[i] = fmaxf(kept, __shfl_xor_sync(kAllLanes, given, half));
    }
  }
  float most = held[0];
#pragma unroll
  for (int apart = kVectorsQuantized; apart < kLanes; apart *= 2)
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, apart));
  return most;
}

// One row that a warp quantises. The constructor begins to load it.
template <class From>
class QuantizedRow {
 public:
  __device__ __forceinline__ QuantizedRow(const char* from, int64_t hidden)
      : from_(reinterpret_cast<const int4*>(from)), vectors_(static_cast<int>(hidden / From::kPerVector)) {
    load(0);
  }

  // All lanes: writes scales and elements to each slot image. `images`: addresses of slots, or of a stage.
  __device__ __forceinline__ void write(const uint64_t* images, int num_images, const SlotLayout& lay) {
    for (int base = 0; base < vectors_; base += kStep) {
      int4 vectors[kVectorsQuantized];
      float most[kVectorsQuantized];
#pragma unroll
      for (int i = 0; i < kVectorsQuantized; ++i) vectors[i] = next_[i];
      load(base + kStep);
#pragma unroll
      for (int i = 0; i < kVectorsQuantized; ++i) most[i] = maximum(vectors[i]);
      const float scale = e4m3_scale(shared_maximum<kLanes>(most));
      const Divisor mine(scale);
      write_scale(images, num_images, lay, base, scale);
#pragma unroll
      for (int i = 0; i < kVectorsQuantized; ++i) {
        if (base + i * kWarp >= vectors_) break;  // the same for all lanes
        const Divisor divisor(__shfl_sync(kAllLanes, mine.scale, i, kLanes),
                              __shfl_sync(kAllLanes, mine.high, i, kLanes),
                              __shfl_sync(kAllLanes, mine.lift, i, kLanes));
        write_vector(images, num_images, lay, base + i * kWarp + lane_id(), vectors[i], divisor);
      }
    }
  }

 private:
  static constexpr int kLanes = kScaleBlock / From::kPerVector;  // lanes that share a scale block
  static constexpr int kWords = From::kPerVector / 4;            // words of 4 quantised elements, from one vector
  static constexpr int kStep = kVectorsQuantized * kWarp;

  __device__ __forceinline__ void load(int base) {
#pragma unroll
    for (int i = 0; i < kVectorsQuantized; ++i) {
      const int index = base + i * kWarp + lane_id();
      next_[i] = index < vectors_ ? ptx::ld_coherent(from_ + index) : make_int4(0, 0, 0, 0);
    }
  }

  // The largest magnitude of a vector; NaNs do not count.
  static __device__ __forceinline__ float maximum(int4 vector) {
    float values[From::kPerVector], most = 0.0f;
    From::magnitudes(vector, values);
#pragma unroll
    for (int j = 0; j < From::kPerVector; ++j) most = fmaxf(most, values[j]);
    return most;
  }

  // A lane writes the scale that it has computed: the scale of the block of vector lane % kVectorsQuantized.
  __device__ __forceinline__ void write_scale(const uint64_t* images, int num_images, const SlotLayout& lay, int base,
                                              float scale) const {
    const int vector = lane_id() % kLanes, first = base + vector * kWarp + lane_id() - vector;
    if (vector >= kVectorsQuantized || first >= vectors_) return;
    for (int d = 0; d < num_images; ++d) *at<float>(images[d], lay.scales + first / kLanes * kScaleBytes) = scale;
  }

  __device__ __forceinline__ void write_vector(const uint64_t* images, int num_images, const SlotLayout& lay, int index,
                                               int4 vector, const Divisor& divisor) const {
    float values[From::kPerVector];
    uint32_t words[kWords];
    From::magnitudes(vector, values);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float* four = values + 4 * w;
      const uint32_t low = ptx::to_e4m3x2(divisor.divide(four[0]), divisor.divide(four[1]));
      const uint32_t high = ptx::to_e4m3x2(divisor.divide(four[2]), divisor.divide(four[3]));
      words[w] = ((low | high << 16) & 0x7F7F7F7Fu) | (From::signs(vector, w) & 0x80808080u);
    }
    if (index >= vectors_) return;
    for (int d = 0; d < num_images; ++d) {
      const int64_t to = lay.row + static_cast<int64_t>(index) * From::kPerVector;
      if constexpr (kWords == 2)
        *at<uint2>(images[d], to) = make_uint2(words[0], words[1]);
      else
        *at<uint32_t>(images[d], to) = words[0];
    }
  }

  const int4* const from_;
  const int vectors_;
  int4 next_[kVectorsQuantized];
};

// Waits until all bulk stores of this warp are complete.
__device__ __forceinline__ void wait_until_written() {
  if (lane_id() == 0) ptx::bulk_wait<0>();
  __syncwarp();
}

// Sends rows that a job quantises. All lanes call make<From>(char* stage), which lists the row's destinations and fills
// a stage for store(), or on the plain path make_plain<From>(), which writes the row to its destinations. A row is made
// while the stores of the row before it are in flight, and is stored when these are complete.
template <bool kBulk, class From, class Job>
__device__ void make_rows(Job& job, const Cut& cut) {
  static_assert(Job::kStages >= 2, "a row is stored from one stage while the next is made in another");
  uint32_t rows = 0;
  while (job.next(true) == kRow) {
    if constexpr (kBulk) {
      char* stage = stages_of_warp(cut) + static_cast<int64_t>(rows % Job::kStages) * cut.stage_bytes;
      job.template make<From>(stage);
      wait_until_written();
      job.completed(rows);
      job.store(stage, 0);
      if (lane_id() == 0) ptx::bulk_commit();
      ++rows;
    } else {
      job.template make_plain<From>();
      job.completed(++rows);
    }
  }
  if constexpr (kBulk) wait_until_written();
  job.completed(rows);
}

}  // namespace ep::cuda
