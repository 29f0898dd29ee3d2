#include <algorithm>

#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "swiglu_weighted/swiglu_weighted.h"
#include "swiglu_weighted/swiglu_weighted_math.h"

namespace paddle_gated_ops {
namespace {

using Params = SwigluWeightedBwdParams;

// A row is the work of a group of threads, kVectorColumns columns each at a time. Narrow rows share a block (blockDim
// is {lanes of a group, rows}); a row of more than 32 vectors has a block of its own. The group's size depends on the
// row's width alone, and with it the order of the sum.
constexpr int kBlockThreads = 256;
constexpr int kMaxRowThreads = kBlockThreads;

// probs_grad: a tree over each eight FP32 terms, FP64 from there on.
__device__ __forceinline__ double RowSum(double sum) {
  sum = GroupSum(sum, min(int(blockDim.x), 32));
  if (blockDim.x <= 32) return sum;
  __shared__ double warp_sums[kMaxRowThreads / 32];
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < int(blockDim.x / 32); ++warp) sum += warp_sums[warp];
  }
  return sum;  // the row's in thread 0
}

// [rows, I] -> [rows, I] x 3 and [rows]: every element is read once and written once.
template <bool kVector, bool kOneDim>
__global__ void __launch_bounds__(kBlockThreads) SwigluWeightedBwdKernel(const __grid_constant__ Params p) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = row < p.space.rows;  // all threads of a warp stay for the shuffles
  const RowIndex index = MakeRowIndex<kOneDim>(p.space, active ? row : 0);
  double sum = 0.0;
  if (active) {
    const auto pointer = [&](const auto& view) { return RowPointer<kOneDim>(p.space, view, index); };
    const Bf16 *gate_row = pointer(p.gate), *up_row = pointer(p.up), *output_grad_row = pointer(p.output_grad);
    Bf16 *gate_grad_row = pointer(p.gate_grad), *up_grad_row = pointer(p.up_grad), *output_row = pointer(p.output);
    const float prob = *pointer(p.probs);
    const int64_t columns = p.intermediate_size;
    for (int64_t column = threadIdx.x * kVectorColumns; column < columns; column += blockDim.x * kVectorColumns) {
      const Bf16x8 gate_bits = Load8<kVector>(gate_row, column, p.gate.column_stride, columns);
      const Bf16x8 up_bits = Load8<kVector>(up_row, column, p.up.column_stride, columns);
      const Bf16x8 output_grad_bits = Load8<kVector>(output_grad_row, column, p.output_grad.column_stride, columns);
      float gate[8], up[8], output_grad[8];
      Unpack(gate_bits, gate), Unpack(up_bits, up), Unpack(output_grad_bits, output_grad);

      float gate_grad[8], up_grad[8], output[8], probs_terms[8];
#pragma unroll
      for (int i = 0; i < kVectorColumns; ++i) {
        const SwigluWeightedGrads grads = SwigluWeightedBackward(gate[i], up[i], output_grad[i], prob);
        gate_grad[i] = grads.gate_grad;
        up_grad[i] = grads.up_grad;
        output[i] = grads.output;
        probs_terms[i] = grads.probs_term;
      }
      // Columns past the row's end were loaded as zeros, and a zero's term is 0.
      sum += double(TreeSum8(probs_terms));
      Store8<kVector>(Pack(gate_grad), gate_grad_row, column, p.gate_grad.column_stride, columns);
      Store8<kVector>(Pack(up_grad), up_grad_row, column, p.up_grad.column_stride, columns);
      Store8<kVector>(Pack(output), output_row, column, p.output.column_stride, columns);
    }
  }
  sum = RowSum(sum);
  if (active && threadIdx.x == 0) *RowPointer<kOneDim>(p.space, p.probs_grad, index) = float(sum);
}

dim3 BlockShape(int64_t columns) {
  const int64_t vectors = (columns + kVectorColumns - 1) / kVectorColumns;
  if (vectors > 32) {
    // Two rounds of half the threads beat one: on an H200 by 7 % at 1408 columns, by 3 % at 1536.
    const int64_t rounds = std::max<int64_t>(vectors > 128 ? 2 : 1, (vectors + kMaxRowThreads - 1) / kMaxRowThreads);
    const int64_t threads = (vectors + rounds - 1) / rounds;  // all rounds as full as can be
    return dim3(unsigned((threads + 31) / 32 * 32));
  }
  unsigned lanes = 1;
  while (lanes < vectors) lanes *= 2;
  return dim3(lanes, kBlockThreads / lanes);
}

constexpr void (*kKernels[2][2])(Params) = {  // [16-byte accesses][one leading dimension]
    {SwigluWeightedBwdKernel<false, false>, SwigluWeightedBwdKernel<false, true>},
    {SwigluWeightedBwdKernel<true, false>, SwigluWeightedBwdKernel<true, true>}};

}  // namespace

int LaunchSwigluWeightedBwdCuda(const SwigluWeightedBwdParams& p, int device, void* stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
  const auto aligned = [&](const auto& view) { return IsVectorAligned(p.space, view); };
  const bool vector = p.intermediate_size % kVectorColumns == 0 && aligned(p.gate) && aligned(p.up) &&
                      aligned(p.output_grad) && aligned(p.gate_grad) && aligned(p.up_grad) && aligned(p.output);
  const dim3 block = BlockShape(p.intermediate_size);
  const int64_t blocks = (p.space.rows + block.y - 1) / block.y;  // past 2^31 - 1 only with over 2^39 elements
  return LaunchKernel(kKernels[vector][p.space.ndim == 1], dim3(unsigned(blocks)), block, p, stream);
}

}  // namespace paddle_gated_ops
