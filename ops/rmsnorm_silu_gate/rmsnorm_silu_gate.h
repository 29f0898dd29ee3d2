// What the kernels of gated RMSNorm are given, and their launchers. Stands alone: no Paddle.
#pragma once

#include "common/numerics.h"
#include "common/row_space.h"

namespace paddle_gated_ops {

constexpr int kNormSize = 128;

// The weight gradient sums kFp32Rows rows at most in FP32, chunks of rows in FP64, and FP64 over the chunks. A unit is what
// a GPU block takes at a time. Chunks are whole units and depend on `rows` alone: the sum's order is no GPU's affair.
constexpr int kUnitRows = 16;
constexpr int kFp32Rows = 16;
// Measured on an H200 with its 132 multiprocessors. Up to 32 rows: one block, which needs no second launch to add chunks.
// Few rows: two blocks on each. Many: three, and the rounds that are left over, a 32nd of them at least where there are 32,
// in small chunks, which go to whoever is done first; that takes 4 % off at 524288 rows, as some multiprocessors are faster
// than others.
constexpr int64_t kManyRows = 81920;
constexpr int kOneChunkUnits = 2;
constexpr int kFewChunks = 264;
constexpr int kMainChunks = 396;
constexpr int kTailShare = 32, kTailUnits = 2, kMaxTailChunks = 396;

GATED_OPS_INLINE int64_t UnitCount(int64_t rows) { return (rows + kUnitRows - 1) / kUnitRows; }

// Main chunks share the units before main_units, tail chunks the rest.
struct ChunkPlan {
  int main, tail;
  int64_t main_units;
};
GATED_OPS_INLINE ChunkPlan PlanChunks(int64_t rows) {
  const int64_t units = UnitCount(rows);
  if (units <= kOneChunkUnits) return {units == 0 ? 0 : 1, 0, units};
  if (rows < kManyRows) return {int(units < kFewChunks ? units : kFewChunks), 0, units};
  const int64_t rounds = units / kMainChunks, main_units = (rounds - rounds / kTailShare) * kMainChunks;
  const int64_t tail = (units - main_units + kTailUnits - 1) / kTailUnits;
  return {kMainChunks, int(tail < kMaxTailChunks ? tail : kMaxTailChunks), main_units};
}
GATED_OPS_INLINE int ChunkCount(int64_t rows) {
  const ChunkPlan plan = PlanChunks(rows);
  return plan.main + plan.tail;
}

// A GPU's chunk: the units begin, begin + step, ... before end. So all blocks read and write close by each other, which is
// faster than runs of neighbouring units by 3 %.
struct Chunk {
  int64_t begin, end, step;
};
GATED_OPS_INLINE Chunk ChunkOf(int64_t rows, int chunk) {
  const ChunkPlan plan = PlanChunks(rows);
  if (chunk < plan.main) return {chunk, plan.main_units, plan.main};
  return {plan.main_units + chunk - plan.main, UnitCount(rows), plan.tail};
}

// A CPU's: neighbouring units, from here on to the next chunk's. No product with rows: nothing overflows.
GATED_OPS_INLINE int64_t ChunkBegin(int64_t units, int chunks, int chunk) {
  const int64_t even = units / chunks, rest = units % chunks;
  return even * chunk + (chunk < rest ? chunk : rest);
}

struct RmsNormSiluGateFwdParams {
  float eps;
  bool fresh_outputs;  // its memory is new and has never been written
  // Inputs
  RowView<const Bf16> x;     // [rows, 128]
  RowView<const Bf16> gate;  // [rows, 128], z
  const Bf16* weight;        // [128]
  int64_t weight_stride;
  // Output
  RowView<Bf16> output;  // [rows, 128], y
  RowSpace space;        // the rows
};

struct RmsNormSiluGateBwdParams {
  float eps;
  bool fresh_outputs;  // as above, of grad_x or grad_z
  // Inputs
  RowView<const Bf16> output_grad;  // [rows, 128], grad_out
  RowView<const Bf16> x;            // [rows, 128]
  RowView<const Bf16> gate;         // [rows, 128], z
  const Bf16* weight;               // [128]
  int64_t weight_stride;
  // Outputs; null data where one is not wanted
  RowView<Bf16> x_grad;     // [rows, 128]
  RowView<Bf16> gate_grad;  // [rows, 128]
  // The weight gradient, [128]: BF16, or FP32, or both null
  Bf16* weight_grad_bf16;
  float* weight_grad_fp32;
  int64_t weight_grad_stride;
  bool accumulate_weight_grad;  // add to what is there, before the one rounding
  // [ChunkCount(rows), 128] in an order of the device's own: scratch, 8-byte aligned, written before it is read; null with
  // the above
  double* chunk_sums;
  RowSpace space;
};

// The bytes of a workspace that holds chunk_sums wherever its 4-byte aligned memory begins. Never falls as rows grow, so
// that a workspace for more rows serves fewer.
GATED_OPS_INLINE int64_t WorkspaceBytes(int64_t rows) {
  const int64_t chunks = rows < kManyRows ? ChunkCount(rows) : kMainChunks + kMaxTailChunks;
  return chunks * kNormSize * int64_t(sizeof(double)) + 4;
}

// One column of the weight gradient, from the FP64 sum over all rows.
GATED_OPS_INLINE void StoreWeightGrad(const RmsNormSiluGateBwdParams& p, int column, double sum) {
  const int64_t at = column * p.weight_grad_stride;
  if (p.weight_grad_bf16 != nullptr) {
    const double before = p.accumulate_weight_grad ? double(Bf16ToFloat(p.weight_grad_bf16[at])) : 0.0;
    p.weight_grad_bf16[at] = DoubleToBf16(before + sum);
  } else {
    const double before = p.accumulate_weight_grad ? double(p.weight_grad_fp32[at]) : 0.0;
    p.weight_grad_fp32[at] = DoubleToFloat(before + sum);
  }
}

void LaunchRmsNormSiluGateFwdCpu(const RmsNormSiluGateFwdParams& params);
void LaunchRmsNormSiluGateBwdCpu(const RmsNormSiluGateBwdParams& params);

// On `stream` of GPU `device`. Return the launches' cudaError_t; 0 is success.
int LaunchRmsNormSiluGateFwdCuda(const RmsNormSiluGateFwdParams& params, int device, void* stream);
int LaunchRmsNormSiluGateBwdCuda(const RmsNormSiluGateBwdParams& params, int device, void* stream);

}  // namespace paddle_gated_ops
