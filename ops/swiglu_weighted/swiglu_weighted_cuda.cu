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

// One row of a view, read and written 8 columns at a time; a null view is not there. `columns` is 0 for a thread whose row is
// past the last: with shifted accesses it has to come along, as neighbours hand each other elements.
template <Access kAccess, typename T>
struct RowCursor {
  T* row;
  int64_t stride, columns;

  __device__ __forceinline__ Bf16x8 Load(int64_t column) const {
    return kAccess == kVector ? LoadAlignedStreaming(row + column) : Load8<kAccess>(row, column, stride, columns);
  }
  __device__ __forceinline__ void Store(int64_t column, const float (&values)[kVectorColumns]) const {
    if (row == nullptr) return;
    Store8<kAccess>(Pack(values), row, column, stride, columns, threadIdx.x, min(int(blockDim.x), 32));
  }
};

// The thread's row, and its place in it.
template <Access kAccess, bool kOneDim, typename Params>
struct RowThread {
  const Params& p;
  const int64_t row;
  const bool active;
  const RowIndex index;

  __device__ __forceinline__ explicit RowThread(const Params& params)
      : p(params),
        row(int64_t(blockIdx.x) * blockDim.y + threadIdx.y),
        active(row < p.space.rows),
        index(MakeRowIndex<kOneDim>(p.space, active ? row : 0)) {}

  template <typename T>
  __device__ __forceinline__ T* Pointer(const RowView<T>& view) const {
    return view.data == nullptr ? nullptr : RowPointer<kOneDim>(p.space, view, index);
  }
  template <typename T>
  __device__ __forceinline__ RowCursor<kAccess, T> Cursor(const RowView<T>& view) const {
    return {Pointer(view), view.column_stride, active ? p.intermediate_size : 0};
  }
  // Calls body(column) for each eight columns of the thread.
  template <typename Body>
  __device__ __forceinline__ void ForEachColumn(const Body& body) const {
    const int64_t own = threadIdx.x * kVectorColumns, step = blockDim.x * kVectorColumns;
    if (kAccess == kShifted) {
      for (int64_t begin = 0; begin < p.intermediate_size; begin += step) body(begin + own);  // the whole warp
    } else if (active) {
      for (int64_t column = own; column < p.intermediate_size; column += step) body(column);
    }
  }
};

// [rows, I] x 2 and [rows] -> [rows, I]
template <Access kAccess, bool kOneDim, bool kClamp>
__global__ void __launch_bounds__(kBlockThreads) SwigluWeightedFwdKernel(const __grid_constant__ FwdParams p) {
  const RowThread<kAccess, kOneDim, FwdParams> thread(p);
  const auto gate_row = thread.Cursor(p.gate), up_row = thread.Cursor(p.up);
  const auto output_row = thread.Cursor(p.output);
  const float prob = *thread.Pointer(p.probs);
  thread.ForEachColumn([&](int64_t column) {
    const Bf16x8 gate_bits = gate_row.Load(column), up_bits = up_row.Load(column);
    float gate[8], up[8], output[8];
    Unpack(gate_bits, gate), Unpack(up_bits, up);
#pragma unroll
    for (int i = 0; i < kVectorColumns; ++i) output[i] = SwigluWeightedForward<kClamp>(gate[i], up[i], prob, p.clamp);
    output_row.Store(column, output);
  });
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
template <Access kAccess, bool kOneDim, bool kClamp>
__global__ void __launch_bounds__(kBlockThreads) SwigluWeightedBwdKernel(const __grid_constant__ BwdParams p) {
  const RowThread<kAccess, kOneDim, BwdParams> thread(p);
  const auto gate_row = thread.Cursor(p.gate), up_row = thread.Cursor(p.up), output_grad_row = thread.Cursor(p.output_grad);
  const auto gate_grad_row = thread.Cursor(p.gate_grad), up_grad_row = thread.Cursor(p.up_grad);
  const auto output_row = thread.Cursor(p.output);
  const float prob = *thread.Pointer(p.probs);
  double sum = 0.0;
  thread.ForEachColumn([&](int64_t column) {
    const Bf16x8 gate_bits = gate_row.Load(column), up_bits = up_row.Load(column),
                 output_grad_bits = output_grad_row.Load(column);
    float gate[8], up[8], output_grad[8];
    Unpack(gate_bits, gate), Unpack(up_bits, up), Unpack(output_grad_bits, output_grad);

    float gate_grad[8], up_grad[8], output[8], probs_terms[8];
#pragma unroll
    for (int i = 0; i < kVectorColumns; ++i) {
      const SwigluWeightedGrads grads = SwigluWeightedBackward<kClamp>(gate[i], up[i], output_grad[i], prob, p.clamp);
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
  });
  if (p.probs_grad.data == nullptr) return;
  sum = RowSum(sum);
  if (thread.active && threadIdx.x == 0) *thread.Pointer(p.probs_grad) = float(sum);
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

// [Access][one leading dimension][clamp]
#define GATED_OPS_INSTANTIATE(kernel, access)                              \
  {                                                                        \
    {kernel<access, false, false>, kernel<access, false, true>}, {         \
      kernel<access, true, false>, kernel<access, true, true>              \
    }                                                                      \
  }
constexpr Kernel<FwdParams> kFwdKernels[3][2][2] = {GATED_OPS_INSTANTIATE(SwigluWeightedFwdKernel, kStrided),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedFwdKernel, kShifted),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedFwdKernel, kVector)};
constexpr Kernel<BwdParams> kBwdKernels[3][2][2] = {GATED_OPS_INSTANTIATE(SwigluWeightedBwdKernel, kStrided),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedBwdKernel, kShifted),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedBwdKernel, kVector)};
#undef GATED_OPS_INSTANTIATE

// `views` are those of [rows, I].
template <typename Params, typename... Views>
int Launch(const Kernel<Params> (&kernels)[3][2][2], const Params& p, int device, void* stream, const Views&... views) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
  Access access = std::min({BestAccess(p.space, views)...});
  if (access == kVector && p.intermediate_size % kVectorColumns != 0) access = kShifted;
  const dim3 block = BlockShape(p.intermediate_size);
  const int64_t blocks = (p.space.rows + block.y - 1) / block.y;  // past 2^31 - 1 only with over 2^39 elements
  return LaunchKernel(kernels[access][p.space.ndim == 1][!std::isinf(p.clamp)], dim3(unsigned(blocks)), block, p, stream);
}

}  // namespace

int LaunchSwigluWeightedFwdCuda(const SwigluWeightedFwdParams& p, int device, void* stream) {
  return Launch(kFwdKernels, p, device, stream, p.gate, p.up, p.output);
}

int LaunchSwigluWeightedBwdCuda(const SwigluWeightedBwdParams& p, int device, void* stream) {
  return Launch(kBwdKernels, p, device, stream, p.gate, p.up, p.output_grad, p.gate_grad, p.up_grad, p.output);
}

}  // namespace paddle_gated_ops
