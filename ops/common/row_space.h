// Rows of tensors that share their leading dimensions but not their strides. Stands alone: no Paddle, no CUDA headers.
#pragma once

#include <cstdint>

#include "common/numerics.h"

#ifdef __CUDACC__
#define GATED_OPS_UNROLL _Pragma("unroll")
#else
#define GATED_OPS_UNROLL
#endif

namespace paddle_gated_ops {

constexpr int kMaxLeadingDims = 8;  // Paddle's tensors have at most 9 dimensions
constexpr int kMaxViews = 6;        // with strides of their own, in one call

// The leading dimensions, merged as far as every tensor's strides allow; 1 dimension for contiguous tensors.
struct RowSpace {
  int64_t rows;
  int ndim;  // at least 1
  int64_t sizes[kMaxLeadingDims];
  int64_t inner_strides[kMaxViews][kMaxLeadingDims - 1] = {};  // of each view, for sizes[1] and on
};

// A [rows, columns] view. Strides count elements; they may be 0 (a broadcast input) and past 2^31.
//
// What only several leading dimensions need stands apart, in RowSpace: a GPU waits for each 64 bytes of parameters that a
// kernel reads. With all strides here, small calls took 0.1 to 0.3 us longer on an H200.
template <typename T>
struct RowView {
  T* data;
  int64_t column_stride;
  int64_t row_stride;  // of the first leading dimension
  int inner = 0;       // which of RowSpace::inner_strides
};

// The row's place in each of the leading dimensions.
struct RowIndex {
  int64_t at[kMaxLeadingDims];
};

// The loops have constant bounds, so that a GPU keeps the index in registers.
template <bool kOneDim>
GATED_OPS_INLINE RowIndex MakeRowIndex(const RowSpace& space, int64_t row) {
  RowIndex index;
  if (!kOneDim) {
    GATED_OPS_UNROLL
    for (int d = kMaxLeadingDims - 1; d > 0; --d) {
      if (d >= space.ndim) continue;
      const int64_t size = space.sizes[d];
      // 64-bit division costs a GPU some 70 instructions, 32-bit division 20.
      const bool narrow = ((row | size) >> 32) == 0;
      const int64_t quotient = narrow ? int64_t(uint32_t(row) / uint32_t(size)) : row / size;
      index.at[d] = row - quotient * size;
      row = quotient;
    }
  }
  index.at[0] = row;
  return index;
}

template <bool kOneDim, typename T>
GATED_OPS_INLINE T* RowPointer(const RowSpace& space, const RowView<T>& view, const RowIndex& index) {
  int64_t offset = index.at[0] * view.row_stride;
  if (!kOneDim) {
    GATED_OPS_UNROLL
    for (int d = 1; d < kMaxLeadingDims; ++d) {
      if (d < space.ndim) offset += index.at[d] * space.inner_strides[view.inner][d - 1];
    }
  }
  return view.data + offset;
}

// From a row to the next, where that has the same place in all leading dimensions but the last.
template <typename T>
GATED_OPS_INLINE int64_t NextRowStride(const RowSpace& space, const RowView<T>& view) {
  return space.ndim == 1 ? view.row_stride : space.inner_strides[view.inner][space.ndim - 2];
}

// Merges neighbouring leading dimensions wherever every view's strides allow it. strides[t][d] belongs to view t, which
// receives its row strides.
template <typename... T>
inline RowSpace MergeLeadingDims(int ndim, const int64_t* sizes, const int64_t* const (&strides)[sizeof...(T)],
                                 RowView<T>&... views) {
  constexpr int kTensors = sizeof...(T);
  static_assert(kTensors <= kMaxViews, "RowSpace has no room for so many");
  int64_t merged[kTensors][kMaxLeadingDims] = {};
  RowSpace space = {1, 0, {}};
  for (int d = 0; d < ndim; ++d) {
    space.rows *= sizes[d];
    if (sizes[d] == 1) continue;
    const int last = space.ndim - 1;
    bool mergeable = last >= 0;
    for (int t = 0; t < kTensors && mergeable; ++t) mergeable = merged[t][last] == strides[t][d] * sizes[d];
    if (!mergeable) space.sizes[space.ndim++] = 1;
    space.sizes[space.ndim - 1] *= sizes[d];
    for (int t = 0; t < kTensors; ++t) merged[t][space.ndim - 1] = strides[t][d];
  }
  if (space.ndim == 0) space.sizes[space.ndim++] = 1;  // a single row
  int t = 0;
  const auto set = [&](int64_t& row_stride, int& inner) {
    row_stride = merged[t][0];
    for (int d = 1; d < space.ndim; ++d) space.inner_strides[t][d - 1] = merged[t][d];
    inner = t++;
  };
  (set(views.row_stride, views.inner), ...);
  return space;
}

}  // namespace paddle_gated_ops
