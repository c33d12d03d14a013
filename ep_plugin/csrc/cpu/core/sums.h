// Sums of rows in the element's Sum type, in the order of the rows, rounded once.
#pragma once
#include <algorithm>

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

// Writes the sum of `num_rows` rows of `hidden` elements; zeros if there are none.
template <class T>
void sum_rows(const T* const* rows, int num_rows, int64_t hidden, T* out) {
  typename Sum<T>::type sum[kSumBlock];
  for (int64_t h = 0; h < hidden; h += kSumBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kSumBlock, hidden - h));
    std::fill_n(sum, count, 0);
    for (int i = 0; i < num_rows; ++i) accumulate<T>(sum, rows[i] + h, count);
    narrow_all(sum, count, out + h);
  }
}

}  // namespace ep::cpu
