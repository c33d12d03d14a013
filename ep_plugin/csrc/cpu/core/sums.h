// Sums of rows in the element's Sum type, in the order of the rows, rounded once.
#pragma once
#include <algorithm>

#include "cpu/core/elements.h"

namespace ep::cpu {

constexpr int kSumBlock = 512;  // elements summed at a time: the sums stay in the first-level cache

template <class T>
void accumulate(typename Sum<T>::type* sum, const T* row, int count, typename Sum<T>::type weight) {
  for (int h = 0; h < count; ++h) sum[h] += weight * widen(row[h]);
}
template <class T>
void accumulate(typename Sum<T>::type* sum, const T* row, int count) {
  for (int h = 0; h < count; ++h) sum[h] += widen(row[h]);
}

// Writes the sum of `num_rows` rows of `hidden` elements; zeros if there are none.
template <class T>
void sum_rows(const T* const* rows, int num_rows, int64_t hidden, T* out) {
  typename Sum<T>::type sum[kSumBlock];
  for (int64_t h = 0; h < hidden; h += kSumBlock) {
    const int count = static_cast<int>(std::min<int64_t>(kSumBlock, hidden - h));
    std::fill_n(sum, count, 0);
    for (int i = 0; i < num_rows; ++i) accumulate<T>(sum, rows[i] + h, count);
    for (int i = 0; i < count; ++i) narrow(sum[i], out + h + i);
  }
}

}  // namespace ep::cpu
