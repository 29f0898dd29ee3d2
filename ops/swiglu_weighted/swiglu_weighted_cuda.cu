#include <algorithm>
#include <cmath>

#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "swiglu_weighted/swiglu_weighted.h"
#include "swiglu_weighted/swiglu_weighted_math.h"

namespace paddle_gated_ops {
namespace {

using FwdParams = SwigluWeightedFwdParams;
using BwdParams = SwigluWeightedBwdParams;

// A row is the work of a group of threads, kVectorColumns columns each at a time. Narrow rows share a block (blockDim
// is {lanes of a group, rows}); a row of more than 32 vectors has a block of its own. The group's size depends on the
// row's width alone, and with it the order of the sum.
constexpr int kBlockThreads = 256;
constexpr int kMaxRowThreads = kBlockThreads;

__device__ __forceinline__ int64_t OwnRow() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }

// One row of a view, read and written 8 columns at a time; a null view is not there.
template <bool kVector, typename T>
struct RowCursor {
  T* row;
  int64_t stride, columns;

  __device__ __forceinline__ Bf16x8 Load(int64_t column) const { return Load8<kVector>(row, column, stride, columns); }
  __device__ __forceinline__ void Store(int64_t column, const float (&values)[kVectorColumns]) const {
    if (row != nullptr) Store8<kVector>(Pack(values), row, column, stride, columns);
  }
};

template <bool kVector, bool kOneDim, typename T, typename Params>
__device__ __forceinline__ RowCursor<kVector, T> MakeCursor(const Params& p, const RowView<T>& view,
                                                            const RowIndex& index) {
  return {view.data == nullptr ? nullptr : RowPointer<kOneDim>(p.space, view, index), view.column_stride,
          p.intermediate_size};
}

// [rows, I] x 2 and [rows] -> [rows, I]
template <bool kVector, bool kOneDim, bool kClamp>
__global__ void __launch_bounds__(kBlockThreads) SwigluWeightedFwdKernel(const __grid_constant__ FwdParams p) {
  const int64_t row = OwnRow();
  if (row >= p.space.rows) return;
  const RowIndex index = MakeRowIndex<kOneDim>(p.space, row);
  const auto cursor = [&](const auto& view) { return MakeCursor<kVector, kOneDim>(p, view, index); };
  const auto gate_row = cursor(p.gate), up_row = cursor(p.up);
  const auto output_row = cursor(p.output);
  const float prob = *RowPointer<kOneDim>(p.space, p.probs, index);
  for (int64_t column = threadIdx.x * kVectorColumns; column < p.intermediate_size;
       column += blockDim.x * kVectorColumns) {
    const Bf16x8 gate_bits = gate_row.Load(column), up_bits = up_row.Load(column);
    float gate[8], up[8], output[8];
    Unpack(gate_bits, gate), Unpack(up_bits, up);
#pragma unroll
    for (int i = 0; i < kVectorColumns; ++i) output[i] = SwigluWeightedForward<kClamp>(gate[i], up[i], prob, p.clamp);
    output_row.Store(column, output);
  }
}

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

// [rows, I] x 3 and [rows] -> [rows, I] x 3 and [rows]: every element is read once and written once.
template <bool kVector, bool kOneDim, bool kClamp>
__global__ void __launch_bounds__(kBlockThreads) SwigluWeightedBwdKernel(const __grid_constant__ BwdParams p) {
  const int64_t row = OwnRow();
  const bool active = row < p.space.rows;  // all threads of a warp stay for the shuffles
  const RowIndex index = MakeRowIndex<kOneDim>(p.space, active ? row : 0);
  double sum = 0.0;
  if (active) {
    const auto cursor = [&](const auto& view) { return MakeCursor<kVector, kOneDim>(p, view, index); };
    const auto gate_row = cursor(p.gate), up_row = cursor(p.up), output_grad_row = cursor(p.output_grad);
    const auto gate_grad_row = cursor(p.gate_grad), up_grad_row = cursor(p.up_grad), output_row = cursor(p.output);
    const float prob = *RowPointer<kOneDim>(p.space, p.probs, index);
    for (int64_t column = threadIdx.x * kVectorColumns; column < p.intermediate_size;
         column += blockDim.x * kVectorColumns) {
      const Bf16x8 gate_bits = gate_row.Load(column), up_bits = up_row.Load(column),
                   output_grad_bits = output_grad_row.Load(column);
      float gate[8], up[8], output_grad[8];
      Unpack(gate_bits, gate), Unpack(up_bits, up), Unpack(output_grad_bits, output_grad);

      float gate_grad[8], up_grad[8], output[8], probs_terms[8];
#pragma unroll
      for (int i = 0; i < kVectorColumns; ++i) {
        const SwigluWeightedGrads grads =
            SwigluWeightedBackward<kClamp>(gate[i], up[i], output_grad[i], prob, p.clamp);
        gate_grad[i] = grads.gate_grad;
        up_grad[i] = grads.up_grad;
        output[i] = grads.output;
        probs_terms[i] = grads.probs_term;
      }
      // Columns past the row's end were loaded as zeros, and a zero's term is 0.
      sum += double(TreeSum8(probs_terms));
      gate_grad_row.Store(column, gate_grad);
      up_grad_row.Store(column, up_grad);
      output_row.Store(column, output);
    }
  }
  if (p.probs_grad.data == nullptr) return;
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

template <typename Params>
using Kernel = void (*)(Params);

// [16-byte accesses][one leading dimension][clamp]
constexpr Kernel<FwdParams> kFwdKernels[2][2][2] = {
    {{SwigluWeightedFwdKernel<false, false, false>, SwigluWeightedFwdKernel<false, false, true>},
     {SwigluWeightedFwdKernel<false, true, false>, SwigluWeightedFwdKernel<false, true, true>}},
    {{SwigluWeightedFwdKernel<true, false, false>, SwigluWeightedFwdKernel<true, false, true>},
     {SwigluWeightedFwdKernel<true, true, false>, SwigluWeightedFwdKernel<true, true, true>}}};
constexpr Kernel<BwdParams> kBwdKernels[2][2][2] = {
    {{SwigluWeightedBwdKernel<false, false, false>, SwigluWeightedBwdKernel<false, false, true>},
     {SwigluWeightedBwdKernel<false, true, false>, SwigluWeightedBwdKernel<false, true, true>}},
    {{SwigluWeightedBwdKernel<true, false, false>, SwigluWeightedBwdKernel<true, false, true>},
     {SwigluWeightedBwdKernel<true, true, false>, SwigluWeightedBwdKernel<true, true, true>}}};

// `views` are those of [rows, I]; a null one is not there.
template <typename Params, typename... Views>
int Launch(const Kernel<Params> (&kernels)[2][2][2], const Params& p, int device, void* stream, const Views&... views) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
  const bool vector = p.intermediate_size % kVectorColumns == 0 &&
                      ((views.data == nullptr || IsVectorAligned(p.space, views)) && ...);
  const dim3 block = BlockShape(p.intermediate_size);
  const int64_t blocks = (p.space.rows + block.y - 1) / block.y;  // past 2^31 - 1 only with over 2^39 elements
  return LaunchKernel(kernels[vector][p.space.ndim == 1][!std::isinf(p.clamp)], dim3(unsigned(blocks)), block, p, stream);
}

}  // namespace

int LaunchSwigluWeightedFwdCuda(const SwigluWeightedFwdParams& p, int device, void* stream) {
  return Launch(kFwdKernels, p, device, stream, p.gate, p.up, p.output);
}

int LaunchSwigluWeightedBwdCuda(const SwigluWeightedBwdParams& p, int device, void* stream) {
  return Launch(kBwdKernels, p, device, stream, p.gate, p.up, p.output_grad, p.gate_grad, p.up_grad, p.output);
}

}  // namespace paddle_gated_ops
