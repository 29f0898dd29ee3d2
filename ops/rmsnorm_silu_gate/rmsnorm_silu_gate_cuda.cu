#include <algorithm>

#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/shifted.cuh"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate.h"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate_math.h"

namespace paddle_gated_ops {
namespace {

using FwdParams = RmsNormSiluGateFwdParams;
using BwdParams = RmsNormSiluGateBwdParams;

// A block takes a chunk, a unit of 16 rows at a time: 16 lanes a row, 8 columns a lane.
constexpr int kLanes = kNormSize / kVectorColumns;
constexpr int kBlockThreads = kUnitRows * kLanes;
constexpr int kWarps = kBlockThreads / 32;
constexpr int kFlushUnits = kFp32Rows;  // a lane adds a row of each unit

// Blocks that a multiprocessor must be able to hold. 3 leave a thread 80 registers, and nothing spills; 2 and 4 were 4 and
// 8 % slower on an H200. Shifted accesses and indexing several leading dimensions need more registers.
constexpr int MinBlocks(Access access, bool one_dim) { return access != kVector ? 1 : one_dim ? 3 : 2; }

// 1 / sqrt(mean(x^2) + eps) of the row whose 16 lanes call it.
__device__ __forceinline__ float ReciprocalStd(const float (&x)[kVectorColumns], float eps) {
  float squares[kVectorColumns];
#pragma unroll
  for (int i = 0; i < kVectorColumns; ++i) squares[i] = x[i] * x[i];
  return rsqrtf(GroupSum(TreeSum8(squares), kLanes) * (1.0f / kNormSize) + eps);
}

__device__ __forceinline__ void LoadWeight(const Bf16* weight, int64_t stride, int column, float (&values)[kVectorColumns]) {
#pragma unroll
  for (int i = 0; i < kVectorColumns; ++i) values[i] = Bf16ToFloat(weight[(column + i) * stride]);
}

template <Access kAccess>
__device__ __forceinline__ Bf16x8 LoadRow8(const Bf16* row, int column, int64_t stride) {
  if (kAccess == kVector) return LoadAligned(row + column);
  const InputRow<kAccess> input(row, stride);
  return input.Value(input.Load(column, kNormSize, column + kVectorColumns < kNormSize));
}

// With shifted accesses the threads of a row past the last come along, as neighbours hand each other columns.
template <Access kAccess>
__device__ __forceinline__ void StoreRow8(const Bf16x8& own, Bf16* row, int column, int64_t stride, bool active) {
  const OutputRow<kAccess> output(row, stride);
  if constexpr (kAccess == kShifted) {
    output.Store(LaneBefore(own), own, column, active ? kNormSize : 0);
    if (active && column + kVectorColumns == kNormSize) output.StoreRest(own, column, kNormSize);
  } else {
    if (active) output.Store(own, column, kNormSize);
  }
}

// [rows, 128] x 2 -> [rows, 128]; a block takes a unit.
template <Access kAccess, bool kOneDim>
__global__ void __launch_bounds__(kBlockThreads, 1) RmsNormSiluGateFwdKernel(const __grid_constant__ FwdParams p) {
  const int column = threadIdx.x % kLanes * kVectorColumns;
  const int64_t row = int64_t(blockIdx.x) * kUnitRows + threadIdx.x / kLanes;
  const bool active = row < p.space.rows;  // all lanes of a warp stay for the shuffles
  const RowIndex index = MakeRowIndex<kOneDim>(p.space, active ? row : 0);
  const auto load = [&](const auto& view) {
    return LoadRow8<kAccess>(RowPointer<kOneDim>(p.space, view, index), column, view.column_stride);
  };
  const Bf16x8 x_bits = load(p.x), gate_bits = load(p.gate);
  float x[8], gate[8], weight[8], output[8];
  LoadWeight(p.weight, p.weight_stride, column, weight);
  Unpack(x_bits, x), Unpack(gate_bits, gate);
  const float rstd = ReciprocalStd(x, p.eps);
#pragma unroll
  for (int i = 0; i < 8; ++i) output[i] = GatedNormForward(x[i] * rstd, gate[i], weight[i]);
  StoreRow8<kAccess>(Pack(output), RowPointer<kOneDim>(p.space, p.output, index), column, p.output.column_stride, active);
}

// What one lane reads of one row.
struct RowBits {
  Bf16x8 output_grad, x, gate;
};

template <Access kAccess, bool kOneDim>
__device__ __forceinline__ RowBits LoadRowBits(const BwdParams& p, int64_t row, int column) {
  RowBits bits = {};
  if (row < p.space.rows) {
    const RowIndex index = MakeRowIndex<kOneDim>(p.space, row);
    const auto load = [&](const auto& view) {
      return LoadRow8<kAccess>(RowPointer<kOneDim>(p.space, view, index), column, view.column_stride);
    };
    bits = {load(p.output_grad), load(p.x), load(p.gate)};
  }
  return bits;
}

// A chunk's sums lie in the order in which its block has them: the column of a slot.
__device__ __forceinline__ int ColumnOfSlot(int slot) {
  const int i = slot / 32, lane = slot % kLanes, upper = slot % 32 / kLanes;
  return lane * kVectorColumns + upper * 4 + i;
}

// [rows, 128] x 3 -> [rows, 128] x 2 and chunk_sums [chunks, 128]: every element is read once and written once.
template <Access kAccess, bool kOneDim, bool kWeightGrad>
__global__ void __launch_bounds__(kBlockThreads, MinBlocks(kAccess, kOneDim))
    RmsNormSiluGateBwdKernel(const __grid_constant__ BwdParams p) {
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int column = lane * kVectorColumns;
  const Chunk chunk = ChunkOf(p.space.rows, blockIdx.x);
  if (kWeightGrad && gridDim.x > 1) LetNextKernelCome();

  float weight[8];
  LoadWeight(p.weight, p.weight_stride, column, weight);

  // FP64 sums of a warp's two rows: its lower half keeps the first four of a lane's columns, its upper half the others.
  __shared__ double sums[kWeightGrad ? kWarps : 1][kNormSize / 32][32];  // free of bank conflicts
  const int warp = threadIdx.x / 32, warp_lane = threadIdx.x % 32;
  float weight_terms[8] = {};
  bool flushed = false;
  const auto flush = [&] {
    const bool upper = warp_lane >= kLanes;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float own = upper ? weight_terms[i + 4] : weight_terms[i];
      const float others = upper ? weight_terms[i] : weight_terms[i + 4];
      const double sum = double(own) + double(__shfl_xor_sync(kFullWarp, others, kLanes));
      sums[warp][i][warp_lane] = flushed ? sums[warp][i][warp_lane] + sum : sum;
      weight_terms[i] = weight_terms[i + 4] = 0.0f;
    }
    flushed = true;
  };

  RowBits next = LoadRowBits<kAccess, kOneDim>(p, chunk.begin * kUnitRows + group, column);
  int until_flush = kFlushUnits;
  for (int64_t unit = chunk.begin; unit < chunk.end;
       unit += chunk.step) {  // the same bounds for the whole block: the shuffles need each lane
    const RowBits bits = next;
    const int64_t row = unit * kUnitRows + group;
    if (unit + chunk.step < chunk.end) next = LoadRowBits<kAccess, kOneDim>(p, row + chunk.step * kUnitRows, column);
    const bool active = row < p.space.rows;

    float x[8], output_grad[8], gate[8];
    Unpack(bits.x, x), Unpack(bits.output_grad, output_grad), Unpack(bits.gate, gate);
    const float rstd = ReciprocalStd(x, p.eps);

    float n[8], weighted[8], projection[8], gate_grad[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      n[i] = x[i] * rstd;
      const GatedNormTerms terms = GatedNormBackward(output_grad[i], n[i], gate[i], weight[i]);
      weighted[i] = terms.weighted;
      projection[i] = terms.weighted * n[i];
      gate_grad[i] = terms.gate_grad;
      if (kWeightGrad && active) weight_terms[i] += terms.gated * n[i];
    }
    const float mean_projection = GroupSum(TreeSum8(projection), kLanes) * (1.0f / kNormSize);
    float x_grad[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x_grad[i] = GatedNormInputGrad(weighted[i], n[i], mean_projection, rstd);

    if (kAccess == kShifted || active) {
      const RowIndex index = MakeRowIndex<kOneDim>(p.space, active ? row : 0);
      const auto store = [&](const auto& view, const float (&values)[8]) {
        if (view.data == nullptr) return;
        StoreRow8<kAccess>(Pack(values), RowPointer<kOneDim>(p.space, view, index), column, view.column_stride, active);
      };
      store(p.x_grad, x_grad);
      store(p.gate_grad, gate_grad);
    }
    if (kWeightGrad && --until_flush == 0) {
      flush();
      until_flush = kFlushUnits;
    }
  }

  if (kWeightGrad) {
    flush();
    __syncthreads();
    const int slot = threadIdx.x;
    if (slot < kNormSize) {
      double terms[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) terms[w] = sums[w][slot / 32][slot % 32];
      const double sum = TreeSum8(terms);
      if (gridDim.x == 1) {
        StoreWeightGrad(p, ColumnOfSlot(slot), sum);
      } else {
        p.chunk_sums[int64_t(blockIdx.x) * kNormSize + slot] = sum;
      }
    }
  }
}

// chunk_sums [chunks, 128] -> the weight gradient. A block takes 8 slots; its 32 segments of 8 threads take every 32nd
// chunk each, and a tree adds the segments.
constexpr int kSumSlots = 8;
constexpr int kSumSegments = 32;

__global__ void __launch_bounds__(kSumSlots* kSumSegments) SumChunksKernel(const __grid_constant__ BwdParams p) {
  WaitForKernelBefore();
  const int chunks = ChunkCount(p.space.rows);
  const int slot = blockIdx.x * kSumSlots + threadIdx.x % kSumSlots;
  const int segment = threadIdx.x / kSumSlots;
  double sum = 0.0;
#pragma unroll 8
  for (int chunk = segment; chunk < chunks; chunk += kSumSegments) {
    sum += p.chunk_sums[int64_t(chunk) * kNormSize + slot];
  }
  __shared__ double sums[kSumSegments][kSumSlots];
  sums[segment][threadIdx.x % kSumSlots] = sum;
  for (int half = kSumSegments / 2; half > 0; half /= 2) {
    __syncthreads();
    if (segment < half) {
      sums[segment][threadIdx.x % kSumSlots] += sums[segment + half][threadIdx.x % kSumSlots];
    }
  }
  if (segment == 0) StoreWeightGrad(p, ColumnOfSlot(slot), sums[0][threadIdx.x]);
}

// [Access][one leading dimension]([weight gradient])
constexpr void (*kFwdKernels[3][2])(FwdParams) = {
    {RmsNormSiluGateFwdKernel<kStrided, false>, RmsNormSiluGateFwdKernel<kStrided, true>},
    {RmsNormSiluGateFwdKernel<kShifted, false>, RmsNormSiluGateFwdKernel<kShifted, true>},
    {RmsNormSiluGateFwdKernel<kVector, false>, RmsNormSiluGateFwdKernel<kVector, true>}};
constexpr void (*kBwdKernels[3][2][2])(BwdParams) = {
    {{RmsNormSiluGateBwdKernel<kStrided, false, false>, RmsNormSiluGateBwdKernel<kStrided, false, true>},
     {RmsNormSiluGateBwdKernel<kStrided, true, false>, RmsNormSiluGateBwdKernel<kStrided, true, true>}},
    {{RmsNormSiluGateBwdKernel<kShifted, false, false>, RmsNormSiluGateBwdKernel<kShifted, false, true>},
     {RmsNormSiluGateBwdKernel<kShifted, true, false>, RmsNormSiluGateBwdKernel<kShifted, true, true>}},
    {{RmsNormSiluGateBwdKernel<kVector, false, false>, RmsNormSiluGateBwdKernel<kVector, false, true>},
     {RmsNormSiluGateBwdKernel<kVector, true, false>, RmsNormSiluGateBwdKernel<kVector, true, true>}}};

}  // namespace

int LaunchRmsNormSiluGateFwdCuda(const RmsNormSiluGateFwdParams& p, int device, void* stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
  const auto best = [&](const auto& view) { return BestAccess(p.space, view); };
  const Access access = std::min({best(p.x), best(p.gate), best(p.output)});
  return LaunchKernel(kFwdKernels[access][p.space.ndim == 1], UnitCount(p.space.rows), dim3(kBlockThreads), p, stream);
}

int LaunchRmsNormSiluGateBwdCuda(const RmsNormSiluGateBwdParams& p, int device, void* stream) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
  const auto best = [&](const auto& view) { return BestAccess(p.space, view); };
  const Access access = std::min({best(p.output_grad), best(p.x), best(p.gate), best(p.x_grad), best(p.gate_grad)});
  const bool weight_grad = p.chunk_sums != nullptr;
  const int chunks = ChunkCount(p.space.rows);
  const cudaError_t status =
      LaunchKernel(kBwdKernels[access][p.space.ndim == 1][weight_grad], chunks, dim3(kBlockThreads), p, stream);
  if (status != cudaSuccess || !weight_grad || chunks == 1) return status;
  return LaunchAfterOurs(SumChunksKernel, kNormSize / kSumSlots, dim3(kSumSlots * kSumSegments), p, stream);
}

}  // namespace paddle_gated_ops
