#include <algorithm>
#include <cmath>

#include "common/cpu_isa.h"
#include "common/cpu_row.h"
#include "common/parallel_for.h"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate.h"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate_math.h"

namespace paddle_gated_ops {
namespace {

using FwdParams = RmsNormSiluGateFwdParams;
using BwdParams = RmsNormSiluGateBwdParams;

static_assert(kNormSize == kPieceColumns, "a row is a piece");
constexpr int64_t kForwardTaskRows = 256;

GATED_OPS_INLINE float Sum(const float* terms) {
  float lanes[kLanes];
  LaneSums(terms, lanes);
  return TreeSum(lanes);
}

// 1 / sqrt(mean(x^2) + eps) of a row.
GATED_OPS_INLINE float ReciprocalStd(const Bf16Pair* x, float eps) {
  float squares[kPieceWords];
  for (int i = 0; i < kPieceWords; ++i) {
    const float first = FirstOf(x[i]), second = SecondOf(x[i]);
    squares[i] = first * first + second * second;
  }
  return 1.0f / std::sqrt(Sum(squares) * (1.0f / kNormSize) + eps);
}

GATED_OPS_INLINE void Sigmoids(const Bf16Pair* gate, PieceFloats& sigmoids) {
  for (int i = 0; i < kPieceWords; ++i) {
    sigmoids[0][i] = Sigmoid(FirstOf(gate[i]));
    sigmoids[1][i] = Sigmoid(SecondOf(gate[i]));
  }
}

GATED_OPS_INLINE void ForwardRows(const FwdParams& p, int64_t begin, int64_t end) {
  PieceBuffer weight_buffer, x_buffer, gate_buffer, output_buffer;
  const Bf16Pair* weight = InputRow{p.weight, p.weight_stride}.Piece(0, kNormSize, weight_buffer);
  for (int64_t r = begin; r < end; ++r) {
    const RowIndex index = MakeRowIndex<false>(p.space, r);
    const Bf16Pair* x = MakeRow(p.space, p.x, index).Piece(0, kNormSize, x_buffer);
    const Bf16Pair* gate = MakeRow(p.space, p.gate, index).Piece(0, kNormSize, gate_buffer);
    const OutputRow output_row = MakeRow(p.space, p.output, index);
    Bf16Pair* output = output_row.Piece(0, kNormSize, output_buffer);
    const float rstd = ReciprocalStd(x, p.eps);
    PieceFloats s;
    Sigmoids(gate, s);
    GATED_OPS_INDEPENDENT
    for (int i = 0; i < kPieceWords; ++i) {
      const uint32_t n = x[i], g = gate[i], w = weight[i];
      output[i] = PairOf(GatedNormForward(FirstOf(n) * rstd, FirstOf(g), FirstOf(w), s[0][i]),
                         GatedNormForward(SecondOf(n) * rstd, SecondOf(g), SecondOf(w), s[1][i]));
    }
    output_row.Finish(0, kNormSize, output_buffer);
  }
}

// One row of the gradients; adds its share of the weight gradient to `weight_terms` where that is wanted.
template <bool kWeightGrad>
GATED_OPS_INLINE void Row(const BwdParams& p, const Bf16Pair* weight, int64_t r, PieceFloats& weight_terms) {
  const RowIndex index = MakeRowIndex<false>(p.space, r);
  PieceBuffer x_buffer, output_grad_buffer, gate_buffer, x_grad_buffer, gate_grad_buffer;
  const Bf16Pair* x = MakeRow(p.space, p.x, index).Piece(0, kNormSize, x_buffer);
  const Bf16Pair* output_grad = MakeRow(p.space, p.output_grad, index).Piece(0, kNormSize, output_grad_buffer);
  const Bf16Pair* gate = MakeRow(p.space, p.gate, index).Piece(0, kNormSize, gate_buffer);
  const OutputRow x_grad_row = MakeRow(p.space, p.x_grad, index), gate_grad_row = MakeRow(p.space, p.gate_grad, index);
  Bf16Pair* x_grad = x_grad_row.Piece(0, kNormSize, x_grad_buffer);
  Bf16Pair* gate_grad = gate_grad_row.Piece(0, kNormSize, gate_grad_buffer);

  const float rstd = ReciprocalStd(x, p.eps);
  PieceFloats s, n, weighted;  // n: x may be gone once gate_grad is written
  Sigmoids(gate, s);
  float projections[kPieceWords];
  GATED_OPS_INDEPENDENT
  for (int i = 0; i < kPieceWords; ++i) {
    const uint32_t d = output_grad[i], g = gate[i], w = weight[i];
    n[0][i] = FirstOf(x[i]) * rstd;
    n[1][i] = SecondOf(x[i]) * rstd;
    const GatedNormTerms first = GatedNormBackward(FirstOf(d), n[0][i], FirstOf(g), FirstOf(w), s[0][i]);
    const GatedNormTerms second = GatedNormBackward(SecondOf(d), n[1][i], SecondOf(g), SecondOf(w), s[1][i]);
    gate_grad[i] = PairOf(first.gate_grad, second.gate_grad);
    weighted[0][i] = first.weighted;
    weighted[1][i] = second.weighted;
    projections[i] = first.projection + second.projection;
    if (kWeightGrad) {
      weight_terms[0][i] += first.weight_term;
      weight_terms[1][i] += second.weight_term;
    }
  }
  const float mean_projection = Sum(projections) * (1.0f / kNormSize);
  GATED_OPS_INDEPENDENT
  for (int i = 0; i < kPieceWords; ++i) {
    x_grad[i] = PairOf(GatedNormInputGrad(weighted[0][i], n[0][i], mean_projection, rstd),
                       GatedNormInputGrad(weighted[1][i], n[1][i], mean_projection, rstd));
  }
  x_grad_row.Finish(0, kNormSize, x_grad_buffer);
  gate_grad_row.Finish(0, kNormSize, gate_grad_buffer);
}

// The units [begin, end) of 16 rows: FP32 inside a unit, FP64 over the units.
template <bool kWeightGrad>
GATED_OPS_INLINE void Chunk(const BwdParams& p, int64_t begin, int64_t end, double* chunk_sums) {
  PieceBuffer weight_buffer;
  const Bf16Pair* weight = InputRow{p.weight, p.weight_stride}.Piece(0, kNormSize, weight_buffer);
  double sums[2][kPieceWords] = {};
  for (int64_t unit = begin; unit < end; ++unit) {
    PieceFloats weight_terms = {};
    const int64_t last = std::min((unit + 1) * kUnitRows, p.space.rows);
    for (int64_t r = unit * kUnitRows; r < last; ++r) Row<kWeightGrad>(p, weight, r, weight_terms);
    if (kWeightGrad) {
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < kPieceWords; ++i) sums[half][i] += double(weight_terms[half][i]);
      }
    }
  }
  if (kWeightGrad) {
    for (int column = 0; column < kNormSize; ++column) chunk_sums[column] = sums[column % 2][column / 2];
  }
}

GATED_OPS_INLINE void AnyChunk(const BwdParams& p, int64_t begin, int64_t end, double* chunk_sums) {
  if (chunk_sums != nullptr) {
    Chunk<true>(p, begin, end, chunk_sums);
  } else {
    Chunk<false>(p, begin, end, nullptr);
  }
}

void ForwardBaseline(const FwdParams& p, int64_t b, int64_t e) { ForwardRows(p, b, e); }
GATED_OPS_TARGET_AVX2 void ForwardAvx2(const FwdParams& p, int64_t b, int64_t e) { ForwardRows(p, b, e); }
GATED_OPS_TARGET_AVX512 void ForwardAvx512(const FwdParams& p, int64_t b, int64_t e) { ForwardRows(p, b, e); }

constexpr void (*kForward[kNumCpuIsaLevels])(const FwdParams&, int64_t, int64_t) = {ForwardBaseline, ForwardAvx2,
                                                                                    ForwardAvx512};

void ChunkBaseline(const BwdParams& p, int64_t b, int64_t e, double* sums) { AnyChunk(p, b, e, sums); }
GATED_OPS_TARGET_AVX2 void ChunkAvx2(const BwdParams& p, int64_t b, int64_t e, double* sums) { AnyChunk(p, b, e, sums); }
GATED_OPS_TARGET_AVX512 void ChunkAvx512(const BwdParams& p, int64_t b, int64_t e, double* sums) { AnyChunk(p, b, e, sums); }

constexpr void (*kChunk[kNumCpuIsaLevels])(const BwdParams&, int64_t, int64_t, double*) = {ChunkBaseline, ChunkAvx2,
                                                                                           ChunkAvx512};

}  // namespace

void LaunchRmsNormSiluGateFwdCpu(const RmsNormSiluGateFwdParams& p) {
  const int64_t tasks = (p.space.rows + kForwardTaskRows - 1) / kForwardTaskRows;
  const auto run = kForward[CpuIsa()];
  ParallelFor(tasks, p.space.rows * kNormSize * 6, [&](int64_t task) {
    const int64_t begin = task * kForwardTaskRows;
    run(p, begin, std::min(begin + kForwardTaskRows, p.space.rows));
  });
}

void LaunchRmsNormSiluGateBwdCpu(const RmsNormSiluGateBwdParams& p) {
  const int64_t units = UnitCount(p.space.rows);
  const int chunks = ChunkCount(p.space.rows);
  const bool weight_grad = p.chunk_sums != nullptr;
  const auto run = kChunk[CpuIsa()];
  ParallelFor(chunks, p.space.rows * kNormSize * 10, [&](int64_t chunk) {
    run(p, ChunkBegin(units, chunks, int(chunk)), ChunkBegin(units, chunks, int(chunk) + 1),
        weight_grad ? p.chunk_sums + chunk * kNormSize : nullptr);
  });
  if (!weight_grad) return;
  ParallelFor(1, 0, [&](int64_t) {
    double sums[kNormSize] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const double* chunk_sums = p.chunk_sums + int64_t(chunk) * kNormSize;
      for (int column = 0; column < kNormSize; ++column) sums[column] += chunk_sums[column];
    }
    for (int column = 0; column < kNormSize; ++column) StoreWeightGrad(p, column, sums[column]);
  });
}

}  // namespace paddle_gated_ops
