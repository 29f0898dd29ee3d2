#include <algorithm>
#include <cmath>

#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/shifted.cuh"
#include "swiglu_weighted/swiglu_weighted.h"
#include "swiglu_weighted/swiglu_weighted_math.h"

namespace paddle_gated_ops {
namespace {

using FwdParams = SwigluWeightedFwdParams;
using BwdParams = SwigluWeightedBwdParams;

// A row is the work of neighbouring threads, eight columns each in a round; blockDim is {threads of a row, rows}.
constexpr int kMaxRowThreads = 256;
constexpr int kMaxWarps = kMaxRowThreads / 32;
constexpr int kWarpColumns = 32 * kVectorColumns;
constexpr int kWarpRowsThreads = 128;                 // of a block whose rows take a warp or less
constexpr int64_t kMaxIntColumns = int64_t(1) << 30;  // past it column numbers are 64-bit, in the strided kernels alone

// How many blocks of kMaxRowThreads a multiprocessor shall hold, which sets a thread's registers. More threads beat
// prefetches where a row takes one round (on an H200 98 % of a copy's rate against 96 % at 2048 columns); with several it is
// the reverse. The clamp takes some more.
constexpr int MinBlocks(Access access, bool one_dim, bool clamp, bool once) {
  return access == kStrided || !one_dim ? 1 : 4 + once - clamp;
}

template <Access kAccess, bool kOneDim>
struct RowThread {
  const RowSpace& space;
  const int64_t row;
  const bool active;
  const RowIndex index;

  __device__ __forceinline__ explicit RowThread(const RowSpace& row_space)
      : space(row_space),
        row(int64_t(blockIdx.x) * blockDim.y + threadIdx.y),
        active(row < space.rows),
        index(MakeRowIndex<kOneDim>(space, active ? row : 0)) {}

  template <typename T>
  __device__ __forceinline__ T* Pointer(const RowView<T>& view) const {
    return RowPointer<kOneDim>(space, view, index);
  }
  __device__ __forceinline__ InputRow<kAccess> Input(const RowView<const Bf16>& view) const {
    return {Pointer(view), view.column_stride};
  }
  __device__ __forceinline__ OutputRow<kAccess> Output(const RowView<Bf16>& view) const {
    return {Pointer(view), view.column_stride};
  }
};

// Takes a row's threads through its columns: in each round body(eight columns of each input, of each output) computes, after
// loading() has passed the time in which they come. All threads of a block come along to the last round, those past the
// row's end and those of rows past the last with zeros.
template <Access kAccess, bool kOnce, int kInputs, int kOutputs, typename Loading, typename Body>
__device__ __forceinline__ void ForEachRound(const InputRow<kAccess> (&inputs)[kInputs],
                                             const OutputRow<kAccess> (&outputs)[kOutputs], const bool (&wanted)[kOutputs],
                                             typename InputRow<kAccess>::Column width, bool active, const Loading& loading,
                                             const Body& body) {
  using Column = typename InputRow<kAccess>::Column;
  using Bits = typename InputRow<kAccess>::Bits;
  constexpr bool kPrefetch = kAccess == kVector && !kOnce;  // into registers, a round ahead
  const Column own = threadIdx.x * kVectorColumns, step = blockDim.x * kVectorColumns, columns = active ? width : 0;
  __shared__ typename Neighbours<kOutputs, kMaxWarps>::Slots slots;  // with shifted accesses
  Neighbours<kOutputs, kMaxWarps> neighbours(slots);

  const auto load = [&](Bits(&bits)[kInputs], Column column, bool inside) {
#pragma unroll
    for (int i = 0; i < kInputs; ++i) bits[i] = inputs[i].Load(column, columns, inside);
  };
  Bits next[kInputs] = {};
  if (kPrefetch) load(next, own, false);
  for (Column begin = 0; begin < width; begin += step) {
    const Column column = begin + own;
    Bits bits[kInputs];
    if (kPrefetch) {
#pragma unroll
      for (int i = 0; i < kInputs; ++i) bits[i] = next[i];
      load(next, column + step, false);
    } else if (begin + Column(threadIdx.x / 32 + 1) * kWarpColumns < columns) {  // one answer for a warp
      load(bits, column, true);
    } else {
      load(bits, column, false);
    }
    if constexpr (kAccess == kShifted) {
      if (column + step < columns) {
#pragma unroll
        for (int i = 0; i < kInputs; ++i) inputs[i].Prefetch(column + step);
      }
    }
    loading();

    Bf16x8 values[kInputs], results[kOutputs];
#pragma unroll
    for (int i = 0; i < kInputs; ++i) values[i] = inputs[i].Value(bits[i]);
    body(values, results);
    if constexpr (kAccess == kShifted) {
      neighbours.Publish(results);
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        if (wanted[i]) outputs[i].Store(neighbours.Before(i, results[i]), results[i], column, columns);
      }
      if (begin + step >= width && threadIdx.x == blockDim.x - 1) {
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
          if (wanted[i]) outputs[i].StoreRest(results[i], column, columns);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) {
        if (wanted[i] && column < columns) outputs[i].Store(results[i], column, columns);
      }
    }
    if (kOnce) break;
  }
}

// [rows, I] x 2 and [rows] -> [rows, I]
template <Access kAccess, bool kOneDim, bool kClamp, bool kOnce>
__global__ void __launch_bounds__(kMaxRowThreads, MinBlocks(kAccess, kOneDim, kClamp, kOnce))
    SwigluWeightedFwdKernel(const __grid_constant__ FwdParams p) {
  const RowThread<kAccess, kOneDim> thread(p.space);
  const float prob = *thread.Pointer(p.probs);
  const InputRow<kAccess> inputs[] = {thread.Input(p.gate), thread.Input(p.up)};
  const OutputRow<kAccess> outputs[] = {thread.Output(p.output)};
  const auto loading = [] {};
  const auto body = [&](const Bf16x8(&values)[2], Bf16x8(&results)[1]) {
    float gate[8], up[8], output[8];
    Unpack(values[0], gate), Unpack(values[1], up);
#pragma unroll
    for (int i = 0; i < 8; ++i) output[i] = SwigluWeightedForward<kClamp>(gate[i], up[i], prob, p.clamp);
    results[0] = Pack(output);
  };
  ForEachRound<kAccess, kOnce>(inputs, outputs, {true}, p.intermediate_size, thread.active, loading, body);
}

// probs_grad of the block's rows: a tree over each 256 columns, in FP32 over eight and in FP64 from there on, and the trees
// in the order of the columns. So a row's number of threads does not matter to its sum.
template <Access kAccess>
class RowSum {
 public:
  static constexpr int kRounds = 8;
  using Slots = double[kRounds][kMaxWarps];  // the trees that wait to be added

  __device__ __forceinline__ explicit RowSum(Slots& slots) : slots_(slots) {}

  // A thread's sum over its eight columns of this round; Settle must come between two calls, from the whole block.
  __device__ __forceinline__ void Put(float eight) {
    eight_ = eight;
    waiting_ = true;
  }
  __device__ __forceinline__ void Settle() {
    if (!waiting_) return;
    waiting_ = false;
    const double tree = blockDim.x < 32 ? GroupSum(double(eight_), blockDim.x) : GroupSum(double(eight_), 32);
    if (blockDim.x <= 32) {
      sum_ += tree;
      return;
    }
    if (rounds_ == kRounds) {
      Collect();
      __syncthreads();
    }
    if (threadIdx.x % 32 == 0) slots_[rounds_][threadIdx.x / 32] = tree;
    ++rounds_;
  }
  // The row's sum, in its first thread.
  __device__ __forceinline__ double Total() {
    Settle();
    if (blockDim.x > 32) Collect();
    return sum_;
  }

 private:
  __device__ __forceinline__ void Collect() {
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll 1
      for (int round = 0; round < rounds_; ++round) {
        const int warps = blockDim.x / 32;
        if constexpr (kAccess == kVector) {  // all loads at once: 0.15 us off; the other kernels would spill
#pragma unroll
          for (int warp = 0; warp < kMaxWarps; ++warp) {
            const double tree = slots_[round][warp];
            sum_ += warp < warps ? tree : 0.0;
          }
        } else {
#pragma unroll 1
          for (int warp = 0; warp < warps; ++warp) sum_ += slots_[round][warp];
        }
      }
    }
    rounds_ = 0;
  }
  Slots& slots_;
  double sum_ = 0.0;
  float eight_ = 0.0f;
  bool waiting_ = false;
  int rounds_ = 0;
};

// [rows, I] x 3 and [rows] -> [rows, I] x 3 and [rows]: every element is read once and written once.
template <Access kAccess, bool kOneDim, bool kClamp, bool kOnce>
__global__ void __launch_bounds__(kMaxRowThreads, MinBlocks(kAccess, kOneDim, kClamp, kOnce))
    SwigluWeightedBwdKernel(const __grid_constant__ BwdParams p) {
  const RowThread<kAccess, kOneDim> thread(p.space);
  const float prob = *thread.Pointer(p.probs);
  const InputRow<kAccess> inputs[] = {thread.Input(p.gate), thread.Input(p.up), thread.Input(p.output_grad)};
  const OutputRow<kAccess> outputs[] = {thread.Output(p.gate_grad), thread.Output(p.up_grad), thread.Output(p.output)};
  const bool input_grad = p.gate_grad.data != nullptr;
  __shared__ typename RowSum<kAccess>::Slots slots;
  RowSum<kAccess> sum(slots);
  const auto loading = [&] { sum.Settle(); };  // of the round before
  const auto body = [&](const Bf16x8(&values)[3], Bf16x8(&results)[3]) {
    float pair_sums[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // a pair of columns at a time takes fewer registers than eight at once
      float gate[2], up[2], output_grad[2], gate_grad[2], up_grad[2], output[2], probs_terms[2];
      UnpackPair(values[0].pair[i], gate), UnpackPair(values[1].pair[i], up), UnpackPair(values[2].pair[i], output_grad);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const SwigluWeightedGrads grads = SwigluWeightedBackward<kClamp>(gate[j], up[j], output_grad[j], prob, p.clamp);
        gate_grad[j] = grads.gate_grad;
        up_grad[j] = grads.up_grad;
        output[j] = grads.output;
        probs_terms[j] = grads.probs_term;
      }
      results[0].pair[i] = PackPair(gate_grad);
      results[1].pair[i] = PackPair(up_grad);
      results[2].pair[i] = PackPair(output);
      pair_sums[i] = probs_terms[0] + probs_terms[1];
    }
    // Columns past the row's end were loaded as zeros, and a zero's term is 0.
    sum.Put((pair_sums[0] + pair_sums[1]) + (pair_sums[2] + pair_sums[3]));
  };
  ForEachRound<kAccess, kOnce>(inputs, outputs, {input_grad, input_grad, p.output.data != nullptr}, p.intermediate_size,
                               thread.active, loading, body);
  if (p.probs_grad.data == nullptr) return;
  const double total = sum.Total();
  if (thread.active && threadIdx.x == 0) *thread.Pointer(p.probs_grad) = DoubleToFloat(total);
}

// How many warps a row has, of `rounds` that one warp would take. Results do not depend on it; these are the fastest on an
// H200.
int RowWarps(Access access, int64_t rounds) {
  if (access == kShifted) {
    // Two rounds at least where there are two, as prefetches begin with the second; three warps where that leaves fewer idle
    // in the last round.
    if (rounds < 8) return rounds < 4 ? 1 : 2;
    return (rounds + 2) / 3 * 3 < (rounds + 3) / 4 * 4 - 1 ? 3 : 4;
  }
  if (rounds == 5 || rounds == 6) return 3;
  return int(rounds <= kMaxWarps ? rounds : std::min<int64_t>((rounds + 2) / 3, kMaxWarps));
}

dim3 BlockShape(Access access, int64_t columns) {
  const int warps = RowWarps(access, (columns + kWarpColumns - 1) / kWarpColumns);
  if (warps > 1) return dim3(unsigned(warps * 32));
  unsigned lanes = 1;
  while (lanes * kVectorColumns < columns && lanes < 32) lanes *= 2;
  return dim3(lanes, kWarpRowsThreads / lanes);
}

template <typename Params>
using Kernel = void (*)(Params);

// [one leading dimension][clamp] of an access
#define GATED_OPS_INSTANTIATE(kernel, access, once)                            \
  {                                                                            \
    {kernel<access, false, false, once>, kernel<access, false, true, once>}, { \
      kernel<access, true, false, once>, kernel<access, true, true, once>      \
    }                                                                          \
  }
// [Access; after the last, aligned rows of one round]
constexpr Kernel<FwdParams> kFwdKernels[4][2][2] = {GATED_OPS_INSTANTIATE(SwigluWeightedFwdKernel, kStrided, false),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedFwdKernel, kShifted, false),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedFwdKernel, kVector, false),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedFwdKernel, kVector, true)};
constexpr Kernel<BwdParams> kBwdKernels[4][2][2] = {GATED_OPS_INSTANTIATE(SwigluWeightedBwdKernel, kStrided, false),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedBwdKernel, kShifted, false),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedBwdKernel, kVector, false),
                                                    GATED_OPS_INSTANTIATE(SwigluWeightedBwdKernel, kVector, true)};
#undef GATED_OPS_INSTANTIATE

// `views` are those of [rows, I].
template <typename Params, typename... Views>
int Launch(const Kernel<Params> (&kernels)[4][2][2], const Params& p, int device, void* stream, const Views&... views) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
  const int64_t columns = p.intermediate_size;
  Access access = std::min({BestAccess(p.space, views)...});
  if (access == kVector && columns % kVectorColumns != 0) access = kShifted;
  if (columns > kMaxIntColumns) access = kStrided;
  const dim3 block = BlockShape(access, columns);
  const bool once = access == kVector && int64_t(block.x) * kVectorColumns >= columns;
  const int64_t blocks = (p.space.rows + block.y - 1) / block.y;
  return LaunchKernel(kernels[access + once][p.space.ndim == 1][!std::isinf(p.clamp)], blocks, block, p, stream);
}

}  // namespace

int LaunchSwigluWeightedFwdCuda(const SwigluWeightedFwdParams& p, int device, void* stream) {
  return Launch(kFwdKernels, p, device, stream, p.gate, p.up, p.output);
}

int LaunchSwigluWeightedBwdCuda(const SwigluWeightedBwdParams& p, int device, void* stream) {
  return Launch(kBwdKernels, p, device, stream, p.gate, p.up, p.output_grad, p.gate_grad, p.up_grad, p.output);
}

}  // namespace paddle_gated_ops
