#include <algorithm>

#include "common/cpu_isa.h"
#include "common/cpu_row.h"
#include "common/parallel_for.h"
#include "swiglu_weighted/swiglu_weighted.h"
#include "swiglu_weighted/swiglu_weighted_math.h"

namespace paddle_gated_ops {
namespace {

using Params = SwigluWeightedBwdParams;

// A piece of a row. Its probs terms are summed 8 deep in 16 lanes, then by a tree; FP64 sums the pieces.
constexpr int kLanes = 16;
constexpr int kSteps = 8;
constexpr int kPiece = kLanes * kSteps;
constexpr int64_t kTaskBytes = int64_t(256) << 10;  // enough to hide the claim of a task, little enough to balance

// One piece: columns [begin, begin + count). Returns the sum of its probs terms.
struct RowPointers {
  const Bf16 *gate, *up, *output_grad;
  Bf16 *gate_grad, *up_grad, *output;
};

GATED_OPS_INLINE float Piece(const Params& p, const RowPointers& row, float prob, int64_t begin, int count) {
  float gate[kPiece], up[kPiece], output_grad[kPiece];
  LoadRow(row.gate + begin * p.gate.column_stride, p.gate.column_stride, count, gate);
  LoadRow(row.up + begin * p.up.column_stride, p.up.column_stride, count, up);
  LoadRow(row.output_grad + begin * p.output_grad.column_stride, p.output_grad.column_stride, count, output_grad);

  float gate_grad[kPiece], up_grad[kPiece], output[kPiece], probs_terms[kPiece];
  for (int i = 0; i < count; ++i) {
    const SwigluWeightedGrads grads = SwigluWeightedBackward(gate[i], up[i], output_grad[i], prob);
    gate_grad[i] = grads.gate_grad;
    up_grad[i] = grads.up_grad;
    output[i] = grads.output;
    probs_terms[i] = grads.probs_term;
  }
  for (int i = count; i < kPiece; ++i) probs_terms[i] = 0.0f;

  StoreRow(gate_grad, count, row.gate_grad + begin * p.gate_grad.column_stride, p.gate_grad.column_stride);
  StoreRow(up_grad, count, row.up_grad + begin * p.up_grad.column_stride, p.up_grad.column_stride);
  StoreRow(output, count, row.output + begin * p.output.column_stride, p.output.column_stride);
  return TreeSum<kLanes, kSteps>(probs_terms);
}

GATED_OPS_INLINE void Rows(const Params& p, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const RowIndex index = MakeRowIndex<false>(p.space, r);
    const auto pointer = [&](const auto& view) { return RowPointer<false>(p.space, view, index); };
    const RowPointers row = {pointer(p.gate),      pointer(p.up),      pointer(p.output_grad),
                             pointer(p.gate_grad), pointer(p.up_grad), pointer(p.output)};
    const float prob = *pointer(p.probs);
    double probs_grad = 0.0;
    int64_t column = 0;
    // A constant count lets the compiler unroll; the tail's elements get the same operations.
    for (; column + kPiece <= p.intermediate_size; column += kPiece) probs_grad += Piece(p, row, prob, column, kPiece);
    if (column < p.intermediate_size) probs_grad += Piece(p, row, prob, column, int(p.intermediate_size - column));
    *pointer(p.probs_grad) = float(probs_grad);
  }
}

void RowsBaseline(const Params& p, int64_t begin, int64_t end) { Rows(p, begin, end); }
GATED_OPS_TARGET_AVX2 void RowsAvx2(const Params& p, int64_t begin, int64_t end) { Rows(p, begin, end); }
GATED_OPS_TARGET_AVX512 void RowsAvx512(const Params& p, int64_t begin, int64_t end) { Rows(p, begin, end); }

constexpr void (*kRows[kNumCpuIsaLevels])(const Params&, int64_t, int64_t) = {RowsBaseline, RowsAvx2, RowsAvx512};

}  // namespace

void LaunchSwigluWeightedBwdCpu(const SwigluWeightedBwdParams& p) {
  const int64_t row_bytes = 12 * p.intermediate_size + 8;
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskBytes / row_bytes);
  const int64_t tasks = (p.space.rows + rows_per_task - 1) / rows_per_task;
  const auto rows = kRows[CpuIsa()];
  ParallelFor(tasks, p.space.rows * row_bytes, [&](int64_t task) {
    const int64_t begin = task * rows_per_task;
    rows(p, begin, std::min(begin + rows_per_task, p.space.rows));
  });
}

}  // namespace paddle_gated_ops
