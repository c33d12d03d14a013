// Writes the rows of low-latency dispatch: when a token's image has arrived, a warp copies a piece of it to all rows of
// the token on this rank. ll_dispatch.cu describes roles and memory order.
#pragma once
#include "cuda/moe/ll_words.cuh"

namespace ep::cuda {

constexpr int kRowVectors = 2;  // 16-byte vectors of a row that a lane copies at a time

// All lanes call the functions. row_of(k): the row of the token's pair k, -1: none.
class LlRowWriter {
 public:
  __device__ LlRowWriter(const LlRun& ll, const LlDispatchArgs& args, int64_t expert_rows)
      : ll_(ll), args_(args), header_(ll.op.header), expert_rows_(static_cast<unsigned>(expert_rows)) {
    row_pieces_ = static_cast<int>(ceil_div(header_.row_bytes, kRowVectors * kWarp * 16));
  }

  // The number of pieces of an image. The scales are a piece of their own.
  __device__ int pieces() const { return row_pieces_ + (header_.scale_bytes != 0 ? 1 : 0); }

  // Waits for the image of a token of a source with `tokens` tokens. False after a fault.
  template <class RowOf>
  __device__ __forceinline__ bool copy(int source, int tokens, int token, int piece, RowOf row_of) const {
    if (!any(row_of)) return true;
    const Found found = ll_wait_rows(ll_, source, token / ll_group_tokens(tokens));
    if (found == Found::kGaveUp) return false;
    const char* image = found == Found::kThere ? ll_.own().slot(ll_.kind, ll_.parity, source, token) : nullptr;
    if (piece < row_pieces_)
      copy_vectors(image, piece, row_of);
    else
      copy_scales(image, row_of);
    return true;
  }

 private:
  template <class RowOf>
  __device__ __forceinline__ bool any(RowOf row_of) const {
    bool found = false;
#pragma unroll 1
    for (int k = lane_id(); k < header_.topk; k += kWarp) found |= row_of(k) >= 0;
    return __any_sync(kAllLanes, found) != 0;
  }
  // Calls store(row) for each row of the token.
  template <class RowOf, class Store>
  __device__ __forceinline__ void each(RowOf row_of, Store store) const {
#pragma unroll 1
    for (int base = 0; base < header_.topk; base += kWarp) {
      const int k = base + lane_id(), row = k < header_.topk ? row_of(k) : -1;
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, row >= 0); left != 0; left &= left - 1)
        store(__shfl_sync(kAllLanes, row, __ffs(static_cast<int>(left)) - 1));
    }
  }

  // The image is null if its source was masked: the rows become zeros.
  template <class RowOf>
  __device__ __forceinline__ void copy_vectors(const char* image, int piece, RowOf row_of) const {
    const int first = piece * kRowVectors * kWarp + lane_id(), vectors = header_.row_bytes / 16;
    int4 held[kRowVectors];
#pragma unroll
    for (int v = 0; v < kRowVectors; ++v) {
      held[v] = make_int4(0, 0, 0, 0);
      if (image != nullptr && first + v * kWarp < vectors)
        held[v] = ptx::ld_coherent(reinterpret_cast<const int4*>(image) + first + v * kWarp);
    }
    each(row_of, [&](int row) {
      int4* to = at<int4>(args_.tokens, int64_t{row} * header_.row_bytes);
#pragma unroll
      for (int v = 0; v < kRowVectors; ++v)
        if (first + v * kWarp < vectors) to[first + v * kWarp] = held[v];
    });
  }

  // The address of column `column` of the scales of a row. A column is a float32, or four exponents.
  __device__ __forceinline__ int32_t* scale_of(int row, int column) const {
    const unsigned expert = static_cast<unsigned>(row) / expert_rows_;
    const int columns = static_cast<int>(ceil_div(header_.scale_bytes, kScaleBytes));
    return at<int32_t>(args_.scales) + (int64_t{expert} * columns + column) * expert_rows_ +
           (row - expert * expert_rows_);
  }
  template <class RowOf>
  __device__ __forceinline__ void copy_scales(const char* image, RowOf row_of) const {
    const int columns = static_cast<int>(ceil_div(header_.scale_bytes, kScaleBytes));
#pragma unroll 1
    for (int base = 0; base < columns; base += kWarp) {
      const int column = base + lane_id();
      int32_t held = 0;
      if (image != nullptr && column < columns)
        held = ptx::ld_coherent(reinterpret_cast<const int32_t*>(image + header_.row_bytes) + column);
      each(row_of, [&](int row) {
        if (column < columns) *scale_of(row, column) = held;
      });
    }
  }

  const LlRun& ll_;
  const LlDispatchArgs& args_;
  const LlHeader& header_;
  const unsigned expert_rows_;
  int row_pieces_;
};

}  // namespace ep::cuda
