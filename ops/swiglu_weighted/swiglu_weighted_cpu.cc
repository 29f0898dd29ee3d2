#include <algorithm>
#include <cmath>

#include "common/cpu_isa.h"
#include "common/cpu_row.h"
#include "common/parallel_for.h"
#include "swiglu_weighted/swiglu_weighted.h"
#include "swiglu_weighted/swiglu_weighted_math.h"

namespace paddle_gated_ops {
namespace {

using FwdParams = SwigluWeightedFwdParams;
using BwdParams = SwigluWeightedBwdParams;

// A piece of a row. Its probs terms are summed 8 deep in 16 lanes, then by a tree; FP64 sums the pieces.
constexpr int kLanes = 16;
constexpr int kSteps = 8;
constexpr int kPiece = kLanes * kSteps;
constexpr int64_t kTaskBytes = int64_t(256) << 10;  // enough to hide the claim of a task, little enough to balance

// A row of a view, piece by piece; a null row is not there.
template <typename T>
struct RowCursor {
  T* row;
  int64_t stride;

  void Load(int64_t begin, int count, float* to) const { LoadRow(row + begin * stride, stride, count, to); }
  void Store(int64_t begin, int count, const float* from) const {
    if (row != nullptr) StoreRow(from, count, row + begin * stride, stride);
  }
};

template <typename T>
GATED_OPS_INLINE RowCursor<T> MakeCursor(const RowSpace& space, const RowView<T>& view, const RowIndex& index) {
  return {view.data == nullptr ? nullptr : RowPointer<false>(space, view, index), view.column_stride};
}

// Calls piece(begin, count) over a row's columns. A constant count lets the compiler unroll; the tail's elements get the
// same operations.
template <typename PieceBody>
GATED_OPS_INLINE void ForEachPiece(int64_t columns, const PieceBody& piece) {
  int64_t begin = 0;
  for (; begin + kPiece <= columns; begin += kPiece) piece(begin, kPiece);
  if (begin < columns) piece(begin, int(columns - begin));
}

template <bool kClamp>
GATED_OPS_INLINE void Rows(const FwdParams& p, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const RowIndex index = MakeRowIndex<false>(p.space, r);
    const auto gate_row = MakeCursor(p.space, p.gate, index), up_row = MakeCursor(p.space, p.up, index);
    const auto output_row = MakeCursor(p.space, p.output, index);
    const float prob = *RowPointer<false>(p.space, p.probs, index);
    ForEachPiece(p.intermediate_size, [&](int64_t begin, int count) __attribute__((always_inline)) {
      float gate[kPiece], up[kPiece], output[kPiece];
      gate_row.Load(begin, count, gate);
      up_row.Load(begin, count, up);
      for (int i = 0; i < count; ++i) output[i] = SwigluWeightedForward<kClamp>(gate[i], up[i], prob, p.clamp);
      output_row.Store(begin, count, output);
    });
  }
}

template <bool kClamp>
GATED_OPS_INLINE void Rows(const BwdParams& p, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const RowIndex index = MakeRowIndex<false>(p.space, r);
    const auto gate_row = MakeCursor(p.space, p.gate, index), up_row = MakeCursor(p.space, p.up, index),
               output_grad_row = MakeCursor(p.space, p.output_grad, index);
    const auto gate_grad_row = MakeCursor(p.space, p.gate_grad, index),
               up_grad_row = MakeCursor(p.space, p.up_grad, index), output_row = MakeCursor(p.space, p.output, index);
    const float prob = *RowPointer<false>(p.space, p.probs, index);
    double probs_grad = 0.0;
    ForEachPiece(p.intermediate_size, [&](int64_t begin, int count) __attribute__((always_inline)) {
      float gate[kPiece], up[kPiece], output_grad[kPiece];
      gate_row.Load(begin, count, gate);
      up_row.Load(begin, count, up);
      output_grad_row.Load(begin, count, output_grad);
      float gate_grad[kPiece], up_grad[kPiece], output[kPiece], probs_terms[kPiece];
      for (int i = 0; i < count; ++i) {
        const SwigluWeightedGrads grads = SwigluWeightedBackward<kClamp>(gate[i], up[i], output_grad[i], prob, p.clamp);
        gate_grad[i] = grads.gate_grad;
        up_grad[i] = grads.up_grad;
        output[i] = grads.output;
        probs_terms[i] = grads.probs_term;
      }
      for (int i = count; i < kPiece; ++i) probs_terms[i] = 0.0f;
      gate_grad_row.Store(begin, count, gate_grad);
      up_grad_row.Store(begin, count, up_grad);
      output_row.Store(begin, count, output);
      probs_grad += TreeSum<kLanes, kSteps>(probs_terms);
    });
    if (p.probs_grad.data != nullptr) *RowPointer<false>(p.space, p.probs_grad, index) = float(probs_grad);
  }
}

template <typename Params>
GATED_OPS_INLINE void AnyRows(const Params& p, int64_t first, int64_t last) {
  if (std::isinf(p.clamp)) {  // a form of its own: the clamp costs 7 to 12 %
    Rows<false>(p, first, last);
  } else {
    Rows<true>(p, first, last);
  }
}

template <typename Params>
void RowsBaseline(const Params& p, int64_t first, int64_t last) {
  AnyRows(p, first, last);
}
template <typename Params>
GATED_OPS_TARGET_AVX2 void RowsAvx2(const Params& p, int64_t first, int64_t last) {
  AnyRows(p, first, last);
}
template <typename Params>
GATED_OPS_TARGET_AVX512 void RowsAvx512(const Params& p, int64_t first, int64_t last) {
  AnyRows(p, first, last);
}

template <typename Params>
void Launch(const Params& p, int64_t bytes_per_element) {
  constexpr void (*kRows[kNumCpuIsaLevels])(const Params&, int64_t, int64_t) = {RowsBaseline<Params>, RowsAvx2<Params>,
                                                                               RowsAvx512<Params>};
  const int64_t row_bytes = bytes_per_element * p.intermediate_size + 8;
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskBytes / row_bytes);
  const int64_t tasks = (p.space.rows + rows_per_task - 1) / rows_per_task;
  const auto rows = kRows[CpuIsa()];
  ParallelFor(tasks, p.space.rows * row_bytes, [&](int64_t task) {
    const int64_t first = task * rows_per_task;
    rows(p, first, std::min(first + rows_per_task, p.space.rows));
  });
}

}  // namespace

void LaunchSwigluWeightedFwdCpu(const SwigluWeightedFwdParams& p) { Launch(p, 6); }
void LaunchSwigluWeightedBwdCpu(const SwigluWeightedBwdParams& p) { Launch(p, 12); }

}  // namespace paddle_gated_ops
