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

// Sums over a row: 8 deep in 16 lanes, then a tree.
constexpr int kLanes = 16;
constexpr int kSteps = kNormSize / kLanes;
constexpr int64_t kForwardTaskRows = 256;

// 1 / sqrt(mean(x^2) + eps) of a row.
GATED_OPS_INLINE float ReciprocalStd(const float* x, float eps) {
  float squares[kNormSize];
  for (int i = 0; i < kNormSize; ++i) squares[i] = x[i] * x[i];
  const float mean_square = TreeSum<kLanes, kSteps>(squares) * (1.0f / kNormSize);
  return 1.0f / std::sqrt(mean_square + eps);
}

GATED_OPS_INLINE void ForwardRows(const FwdParams& p, int64_t begin, int64_t end) {
  float weight[kNormSize];
  LoadRow(p.weight, p.weight_stride, kNormSize, weight);
  for (int64_t r = begin; r < end; ++r) {
    const RowIndex index = MakeRowIndex<false>(p.space, r);
    const auto pointer = [&](const auto& view) { return RowPointer<false>(p.space, view, index); };
    float x[kNormSize], gate[kNormSize], output[kNormSize];
    LoadRow(pointer(p.x), p.x.column_stride, kNormSize, x);
    LoadRow(pointer(p.gate), p.gate.column_stride, kNormSize, gate);
    const float rstd = ReciprocalStd(x, p.eps);
    for (int i = 0; i < kNormSize; ++i) output[i] = GatedNormForward(x[i] * rstd, gate[i], weight[i]);
    StoreRow(output, kNormSize, pointer(p.output), p.output.column_stride);
  }
}

// One row of the gradients; adds its share of the weight gradient to `weight_terms` where that is wanted.
template <bool kWeightGrad>
GATED_OPS_INLINE void Row(const BwdParams& p, const float* weight, int64_t r, float* weight_terms) {
  const RowIndex index = MakeRowIndex<false>(p.space, r);
  const auto pointer = [&](const auto& view) { return RowPointer<false>(p.space, view, index); };
  float x[kNormSize], output_grad[kNormSize], gate[kNormSize];
  LoadRow(pointer(p.x), p.x.column_stride, kNormSize, x);
  LoadRow(pointer(p.output_grad), p.output_grad.column_stride, kNormSize, output_grad);
  LoadRow(pointer(p.gate), p.gate.column_stride, kNormSize, gate);

  const float rstd = ReciprocalStd(x, p.eps);
  float n[kNormSize], weighted[kNormSize], projection[kNormSize], gate_grad[kNormSize];
  for (int i = 0; i < kNormSize; ++i) {
    n[i] = x[i] * rstd;
    const GatedNormTerms terms = GatedNormBackward(output_grad[i], n[i], gate[i], weight[i]);
    weighted[i] = terms.weighted;
    projection[i] = terms.projection;
    gate_grad[i] = terms.gate_grad;
    if (kWeightGrad) weight_terms[i] += terms.weight_term;
  }
  if (p.x_grad.data != nullptr) {
    const float mean_projection = TreeSum<kLanes, kSteps>(projection) * (1.0f / kNormSize);
    float x_grad[kNormSize];
    for (int i = 0; i < kNormSize; ++i) x_grad[i] = GatedNormInputGrad(weighted[i], n[i], mean_projection, rstd);
    StoreRow(x_grad, kNormSize, pointer(p.x_grad), p.x_grad.column_stride);
  }
  if (p.gate_grad.data != nullptr) StoreRow(gate_grad, kNormSize, pointer(p.gate_grad), p.gate_grad.column_stride);
}

// The units [begin, end) of 16 rows: FP32 inside a unit, FP64 over the units.
template <bool kWeightGrad>
GATED_OPS_INLINE void Chunk(const BwdParams& p, int64_t begin, int64_t end, double* chunk_sums) {
  float weight[kNormSize];
  LoadRow(p.weight, p.weight_stride, kNormSize, weight);
  double sums[kNormSize] = {};
  for (int64_t unit = begin; unit < end; ++unit) {
    float weight_terms[kNormSize] = {};
    const int64_t last = std::min((unit + 1) * kUnitRows, p.space.rows);
    for (int64_t r = unit * kUnitRows; r < last; ++r) Row<kWeightGrad>(p, weight, r, weight_terms);
    if (kWeightGrad) {
      for (int i = 0; i < kNormSize; ++i) sums[i] += double(weight_terms[i]);
    }
  }
  if (kWeightGrad) std::copy(sums, sums + kNormSize, chunk_sums);
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
GATED_OPS_TARGET_AVX512 void ChunkAvx512(const BwdParams& p, int64_t b, int64_t e, double* sums) {
  AnyChunk(p, b, e, sums);
}

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
