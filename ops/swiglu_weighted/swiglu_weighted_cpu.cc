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

constexpr int64_t kTaskBytes = int64_t(256) << 10;  // enough to hide the claim of a task, little enough to balance

template <CpuIsaLevel kIsa, bool kClamp>
GATED_OPS_INLINE void Sigmoids(const Bf16Pair* gate, float clamp, PieceFloats& sigmoids) {
  for (int i = 0; i < kPieceWords; ++i) {
    sigmoids[0][i] = Sigmoid<HasFma(kIsa)>(ClampGate<kClamp>(FirstOf(gate[i]), clamp));
    sigmoids[1][i] = Sigmoid<HasFma(kIsa)>(ClampGate<kClamp>(SecondOf(gate[i]), clamp));
  }
}

template <CpuIsaLevel kIsa, bool kClamp>
GATED_OPS_INLINE void Row(const FwdParams& p, const Lookahead& lookahead, bool stream, int64_t r) {
  const RowIndex index = MakeRowIndex<false>(p.space, r);
  const InputRow gate_row = MakeRow(p.space, p.gate, index), up_row = MakeRow(p.space, p.up, index);
  const OutputRow output_row = MakeRow(p.space, p.output, index, stream);
  const float prob = *RowPointer<false>(p.space, p.probs, index), clamp = p.clamp;
  for (int64_t begin = 0; begin < p.intermediate_size; begin += kPieceColumns) {
    const int count = int(std::min<int64_t>(kPieceColumns, p.intermediate_size - begin));
    PieceBuffer gate_buffer, up_buffer, output_buffer;
    const Bf16Pair* gate = gate_row.Piece(begin, count, gate_buffer);
    const Bf16Pair* up = up_row.Piece(begin, count, up_buffer);
    OutputPiece<kIsa> output(output_row, begin, count, output_buffer);
    const Place ahead = lookahead.From(begin);
    for (const InputRow* row : {&gate_row, &up_row}) row->Prefetch(ahead);
    output_row.Prefetch(ahead);
    PieceFloats s;
    Sigmoids<kIsa, kClamp>(gate, clamp, s);
    GATED_OPS_INDEPENDENT
    for (int i = 0; i < kPieceWords; ++i) {
      const uint32_t g = gate[i], u = up[i];
      output.Put(i, SwigluWeightedForward<kClamp>(FirstOf(g), FirstOf(u), prob, clamp, s[0][i]),
                 SwigluWeightedForward<kClamp>(SecondOf(g), SecondOf(u), prob, clamp, s[1][i]));
    }
    output.Finish();
  }
}

template <CpuIsaLevel kIsa, bool kClamp>
GATED_OPS_INLINE void Row(const BwdParams& p, const Lookahead& lookahead, bool stream, int64_t r) {
  const RowIndex index = MakeRowIndex<false>(p.space, r);
  const InputRow gate_row = MakeRow(p.space, p.gate, index), up_row = MakeRow(p.space, p.up, index),
                 output_grad_row = MakeRow(p.space, p.output_grad, index);
  const OutputRow gate_grad_row = MakeRow(p.space, p.gate_grad, index, stream),
                  up_grad_row = MakeRow(p.space, p.up_grad, index, stream),
                  output_row = MakeRow(p.space, p.output, index, stream);
  const float prob = *RowPointer<false>(p.space, p.probs, index), clamp = p.clamp;
  double probs_sums[kLanes] = {};  // FP64 over the pieces
  for (int64_t begin = 0; begin < p.intermediate_size; begin += kPieceColumns) {
    const int count = int(std::min<int64_t>(kPieceColumns, p.intermediate_size - begin));
    PieceBuffer gate_buffer, up_buffer, output_grad_buffer, gate_grad_buffer, up_grad_buffer, output_buffer;
    const Bf16Pair* gate = gate_row.Piece(begin, count, gate_buffer);
    const Bf16Pair* up = up_row.Piece(begin, count, up_buffer);
    const Bf16Pair* output_grad = output_grad_row.Piece(begin, count, output_grad_buffer);
    OutputPiece<kIsa> gate_grad(gate_grad_row, begin, count, gate_grad_buffer);
    OutputPiece<kIsa> up_grad(up_grad_row, begin, count, up_grad_buffer);
    OutputPiece<kIsa> output(output_row, begin, count, output_buffer);
    const Place ahead = lookahead.From(begin);
    for (const InputRow* row : {&gate_row, &up_row, &output_grad_row}) row->Prefetch(ahead);
    for (const OutputRow* row : {&gate_grad_row, &up_grad_row, &output_row}) row->Prefetch(ahead);
    PieceFloats s;
    Sigmoids<kIsa, kClamp>(gate, clamp, s);
    float probs_terms[kPieceWords];
    GATED_OPS_INDEPENDENT
    for (int i = 0; i < kPieceWords; ++i) {
      const uint32_t g = gate[i], u = up[i], d = output_grad[i];
      const auto first =
          SwigluWeightedBackward<kClamp, HasFma(kIsa)>(FirstOf(g), FirstOf(u), FirstOf(d), prob, clamp, s[0][i]);
      const auto second =
          SwigluWeightedBackward<kClamp, HasFma(kIsa)>(SecondOf(g), SecondOf(u), SecondOf(d), prob, clamp, s[1][i]);
      gate_grad.Put(i, first.gate_grad, second.gate_grad);
      up_grad.Put(i, first.up_grad, second.up_grad);
      output.Put(i, first.output, second.output);
      probs_terms[i] = first.probs_term + second.probs_term;
    }
    gate_grad.Finish();
    up_grad.Finish();
    output.Finish();
    float lanes[kLanes];
    LaneSums(probs_terms, lanes);
    GATED_OPS_NO_UNROLL
    for (int lane = 0; lane < kLanes; ++lane) probs_sums[lane] += double(lanes[lane]);
  }
  if (p.probs_grad.data != nullptr) *RowPointer<false>(p.space, p.probs_grad, index) = DoubleToFloat(TreeSum(probs_sums));
}

struct AnyRows {
  template <CpuIsaLevel kIsa, typename Params>
  static GATED_OPS_INLINE void Run(const Params& p, bool stream, int64_t first, int64_t last) {
    const Lookahead lookahead(p.intermediate_size, PrefetchColumns(stream));
    if (std::isinf(p.clamp)) {  // a form of its own: the clamp costs 7 to 12 %
      for (int64_t r = first; r < last; ++r) Row<kIsa, false>(p, lookahead, stream, r);
    } else {
      for (int64_t r = first; r < last; ++r) Row<kIsa, true>(p, lookahead, stream, r);
    }
  }
};

template <typename Params>
void Launch(const Params& p, int64_t bytes_per_element) {
  const int64_t row_bytes = bytes_per_element * p.intermediate_size + 8;
  const int64_t rows_per_task = std::max<int64_t>(1, kTaskBytes / row_bytes);
  const int64_t tasks = (p.space.rows + rows_per_task - 1) / rows_per_task;
  const auto rows = BestRun<AnyRows, const Params&, bool, int64_t, int64_t>();
  const bool stream = StreamOutputs(p.space.rows * row_bytes, p.fresh_outputs);
  ParallelFor(tasks, p.space.rows * row_bytes, [&](int64_t task) {
    const int64_t first = task * rows_per_task;
    rows(p, stream, first, std::min(first + rows_per_task, p.space.rows));
    if (stream) EndStreams();
  });
}

}  // namespace

void LaunchSwigluWeightedFwdCpu(const SwigluWeightedFwdParams& p) { Launch(p, 6); }
void LaunchSwigluWeightedBwdCpu(const SwigluWeightedBwdParams& p) { Launch(p, 12); }

}  // namespace paddle_gated_ops
