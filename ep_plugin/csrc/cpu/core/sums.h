// Sums of rows in the element's Sum type, in the order of the rows, rounded once.
#pragma once
#include <algorithm>

#include "common/views.h"
#include "cpu/core/elements.h"

namespace ep::cpu {

constexpr int kSumBlock = 512;  // elements summed at a time: the sums stay in the first-level cache

// Runs a loop over elements, compiled twice on x86: for processors with AVX2, and for all. Both give the same bits,
// since neither adds and multiplies in one step. The loop is a lambda that is always inlined.
#if defined(__x86_64__)
template <class Loop>
__attribute__((target("avx2"))) void vectorize_avx2(const Loop& loop) {
  loop();
}
template <class Loop>
void vectorize(const Loop& loop) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  has_avx2 ? vectorize_avx2(loop) : loop();
}
#else
template <class Loop>
void vectorize(const Loop& loop) {
  loop();
}
#endif
#define EP_LOOP [=]() __attribute__((always_inline))

template <class T>
void accumulate(typename Sum<T>::type* sum, const T* row, int count, typename Sum<T>::type weight) {
  vectorize(EP_LOOP {
    for (int h = 0; h < count; ++h) sum[h] += weight * widen(row[h]);
  });
}
template <class T>
void accumulate(typename Sum<T>::type* sum, const T* row, int count) {
  vectorize(EP_LOOP {
    for (int h = 0; h < count; ++h) sum[h] += widen(row[h]);
  });
}
template <class T>
void narrow_all(const typename Sum<T>::type* sum, int count, T* out) {
  vectorize(EP_LOOP {
    for (int h = 0; h < count; ++h) narrow(sum[h], out + h);
  });
}

// The row at which sums start: `from` is null, or a row of T or, with `wide`, of sums.
struct Start {
  const void* from = nullptr;
  bool wide = false;
};

// The row of a [T, hidden] bias for one token. bias: 0: there is none.
template <class T>
Start start_of(Address bias, bool wide, int64_t token, int64_t hidden) {
  if (bias == 0) return {};
  const int64_t first = token * hidden;
  if (wide) return {at<const typename Sum<T>::type>(bias) + first, true};
  return {at<const T>(bias) + first, false};
}

// Writes the sum of the start and `num_rows` rows of `hidden` elements; zeros if there are none.
template <class T>
void sum_rows(const T* const* rows, int num_rows, int64_t hidden, T* out, Start start = {}) {
  using S = typename Sum<T>::type;
  S sum[kSumBlock];
  for (int64_t h = 0; h < hidden; h += kSumBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kSumBlock, hidden - h));
    if (start.wide)
      std::copy_n(static_cast<const S*>(start.from) + h, count, sum);
    else
      std::fill_n(sum, count, 0);
    if (start.from != nullptr && !start.wide) accumulate<T>(sum, static_cast<const T*>(start.from) + h, count);
    for (int i = 0; i < num_rows; ++i) accumulate<T>(sum, rows[i] + h, count);
    narrow_all(sum, count, out + h);
  }
}

}  // namespace ep::cpu
