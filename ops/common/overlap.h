// Whether strided views share memory. Stands alone: no Paddle.
//
// Two views share an element where some sum of index * stride equals the distance of their bases: a search over one index
// a dimension, largest stride first. Where strides nest, as tensors' do, the rest of the sum leaves one or two choices at
// each step. A search that takes too long is answered with "may overlap": what can't be excluded is refused.
#pragma once

#include <algorithm>
#include <cstdint>

namespace paddle_gated_ops {

constexpr int kMaxViewDims = 9;

struct MemoryView {
  const char* data;
  int64_t itemsize;  // bytes
  int ndim;
  int64_t sizes[kMaxViewDims];
  int64_t strides[kMaxViewDims];  // elements
};

class OffsetSearch {
 public:
  // A term index * stride with low <= index <= high; stride in bytes, not negative.
  void Add(int64_t stride, int64_t low, int64_t high) {
    for (int i = 0; i < count_; ++i) {
      if (terms_[i].stride == stride) {
        terms_[i].low += low, terms_[i].high += high;
        return;
      }
    }
    terms_[count_++] = {stride, low, high};
  }

  // Whether the terms may add up to the target.
  bool MayReach(int64_t target) {
    std::sort(terms_, terms_ + count_, [](const Term& a, const Term& b) { return a.stride > b.stride; });
    least_[count_] = most_[count_] = 0;
    for (int i = count_ - 1; i >= 0; --i) {
      least_[i] = least_[i + 1] + terms_[i].low * terms_[i].stride;
      most_[i] = most_[i + 1] + terms_[i].high * terms_[i].stride;
    }
    steps_ = 10000;
    return Search(0, target);
  }

 private:
  struct Term {
    int64_t stride, low, high;
  };

  static int64_t FloorDiv(int64_t a, int64_t b) { return a / b - (a % b < 0); }

  bool Search(int i, int64_t target) {
    if (target < least_[i] || target > most_[i]) return false;
    if (i == count_ || terms_[i].stride == 0) return true;  // a term of stride 0 is last, and adds nothing
    if (--steps_ < 0) return true;
    const Term& term = terms_[i];
    // What the terms after this one can make up for bounds the index.
    const int64_t low = std::max(term.low, -FloorDiv(most_[i + 1] - target, term.stride));
    const int64_t high = std::min(term.high, FloorDiv(target - least_[i + 1], term.stride));
    for (int64_t index = low; index <= high; ++index) {
      if (Search(i + 1, target - index * term.stride)) return true;
    }
    return false;
  }

  int count_ = 0;
  Term terms_[2 * kMaxViewDims + 1];
  int64_t least_[2 * kMaxViewDims + 2], most_[2 * kMaxViewDims + 2];
  int64_t steps_ = 0;
};

inline bool IsEmpty(const MemoryView& view) {
  for (int d = 0; d < view.ndim; ++d) {
    if (view.sizes[d] == 0) return true;
  }
  return false;
}

// The same addresses without negative strides.
inline MemoryView WithPositiveStrides(MemoryView view) {
  for (int d = 0; d < view.ndim; ++d) {
    if (view.strides[d] < 0) {
      view.data += view.strides[d] * view.itemsize * (view.sizes[d] - 1);
      view.strides[d] = -view.strides[d];
    }
  }
  return view;
}

// Whether the views may share a byte.
inline bool MayOverlap(const MemoryView& first, const MemoryView& second) {
  if (IsEmpty(first) || IsEmpty(second)) return false;
  const MemoryView a = WithPositiveStrides(first), b = WithPositiveStrides(second);
  // a.data + a's offset + a's byte = b.data + b's offset + b's byte
  OffsetSearch search;
  for (int d = 0; d < a.ndim; ++d) search.Add(a.strides[d] * a.itemsize, 0, a.sizes[d] - 1);
  for (int d = 0; d < b.ndim; ++d) search.Add(b.strides[d] * b.itemsize, 1 - b.sizes[d], 0);
  search.Add(1, 1 - b.itemsize, a.itemsize - 1);
  return search.MayReach(b.data - a.data);
}

// Whether two elements of the view may share a byte.
inline bool MayOverlapItself(const MemoryView& original) {
  if (IsEmpty(original)) return false;
  const MemoryView view = WithPositiveStrides(original);
  // Two index tuples differ first in dimension d; call the larger one the first.
  for (int d = 0; d < view.ndim; ++d) {
    if (view.sizes[d] == 1) continue;
    OffsetSearch search;
    search.Add(view.strides[d] * view.itemsize, 1, view.sizes[d] - 1);
    for (int e = d + 1; e < view.ndim; ++e) {
      search.Add(view.strides[e] * view.itemsize, 1 - view.sizes[e], view.sizes[e] - 1);
    }
    search.Add(1, 1 - view.itemsize, view.itemsize - 1);
    if (search.MayReach(0)) return true;
  }
  return false;
}

// Whether the views, of one shape, have each element in the same place.
inline bool IsSameMemory(const MemoryView& a, const MemoryView& b) {
  bool same = a.data == b.data && a.itemsize == b.itemsize && a.ndim == b.ndim;
  for (int d = 0; d < a.ndim && same; ++d) {
    same = a.sizes[d] == b.sizes[d] && (a.sizes[d] == 1 || a.strides[d] == b.strides[d]);
  }
  return same;
}

}  // namespace paddle_gated_ops
