// Eight BF16 columns at a time, the share of one thread.
#pragma once

#include "common/numerics.h"
#include "common/row_space.h"

namespace paddle_gated_ops {

constexpr int kVectorColumns = 8;  // BF16 columns in 16 bytes

// Raw bits as loaded: unpacked late, they hold half the registers while the loads are in flight.
struct alignas(16) Bf16x8 {
  uint32_t pair[4];  // low half first
};

__device__ __forceinline__ void UnpackPair(uint32_t pair, float (&values)[2]) {
  values[0] = __uint_as_float(pair << 16);
  values[1] = __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ void Unpack(const Bf16x8& packed, float (&values)[kVectorColumns]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float pair[2];
    UnpackPair(packed.pair[i], pair);
    values[2 * i] = pair[0], values[2 * i + 1] = pair[1];
  }
}

// Round to nearest, ties to even; every NaN becomes 0x7fff. The instruction begins with sm_80, as the library does.
__device__ __forceinline__ uint32_t PackPair(const float (&values)[2]) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(values[1]), "f"(values[0]));
  return packed;
}

__device__ __forceinline__ Bf16x8 Pack(const float (&values)[kVectorColumns]) {
  Bf16x8 packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.pair[i] = PackPair({values[2 * i], values[2 * i + 1]});
  return packed;
}

// How the kernels access rows. All three give a thread the same columns, and so the same bits.
enum Access {
  kStrided,  // element by element: columns lie apart
  kShifted,  // 32-bit loads and 16-byte stores of rows that begin anywhere, shifted into place (shifted.cuh)
  kVector,   // 16-byte accesses of aligned rows
};

// Plain loads; __ldcs (evict first) for rows, 1 % faster on an H200 in the SwiGLU kernels, 2 % slower in the norm's.
__device__ __forceinline__ Bf16x8 LoadAligned(const Bf16* from) {
  const uint4 raw = *reinterpret_cast<const uint4*>(from);
  return {{raw.x, raw.y, raw.z, raw.w}};
}
__device__ __forceinline__ Bf16x8 LoadAlignedStreaming(const Bf16* from) {
  const uint4 raw = __ldcs(reinterpret_cast<const uint4*>(from));
  return {{raw.x, raw.y, raw.z, raw.w}};
}

// Streaming stores (evict first): the outputs are not read again here. Measured 3 % faster than plain ones on an H200.
__device__ __forceinline__ void StoreAligned(const Bf16x8& packed, Bf16* to) {
  __stcs(reinterpret_cast<uint4*>(to), make_uint4(packed.pair[0], packed.pair[1], packed.pair[2], packed.pair[3]));
}

// Elements [first, last) of the eight at from + i * stride; zeros for the others, which are not touched.
__device__ __forceinline__ Bf16x8 LoadSome(const Bf16* from, int64_t stride, int first, int last) {
  Bf16 element[kVectorColumns];
#pragma unroll
  for (int i = 0; i < kVectorColumns; ++i) element[i] = first <= i && i < last ? from[i * stride] : Bf16(0);
  Bf16x8 packed;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed.pair[i] = uint32_t(element[2 * i]) | (uint32_t(element[2 * i + 1]) << 16);
  return packed;
}

__device__ __forceinline__ void StoreSome(const Bf16x8& packed, Bf16* to, int64_t stride, int first, int last) {
#pragma unroll
  for (int i = 0; i < kVectorColumns; ++i) {
    if (first <= i && i < last) to[i * stride] = Bf16(packed.pair[i / 2] >> (i % 2 * 16));
  }
}

// One row of a tensor, read and written eight columns at a time. Load starts a read, and Value waits for it; columns past
// the row's end are zeros and not touched. Inputs may be an output's memory (the in-place forms), so no load goes through
// the non-coherent path. Strided rows may have more columns than an int counts.
template <Access kAccess>
struct InputRow;
template <Access kAccess>
struct OutputRow;

template <>
struct InputRow<kVector> {
  using Bits = Bf16x8;
  using Column = int;
  const Bf16* row;

  __device__ __forceinline__ InputRow(const Bf16* data, int64_t) : row(data) {}
  __device__ __forceinline__ Bits Load(int column, int columns, bool inside) const {
    return inside || column < columns ? LoadAlignedStreaming(row + column) : Bits{};
  }
  __device__ __forceinline__ Bf16x8 Value(const Bits& bits) const { return bits; }
};

template <>
struct OutputRow<kVector> {
  Bf16* row;

  __device__ __forceinline__ OutputRow(Bf16* data, int64_t) : row(data) {}
  __device__ __forceinline__ void Store(const Bf16x8& own, int column, int) const { StoreAligned(own, row + column); }
};

template <>
struct InputRow<kStrided> {
  using Bits = Bf16x8;
  using Column = int64_t;
  const Bf16* row;
  int64_t stride;

  __device__ __forceinline__ InputRow(const Bf16* data, int64_t column_stride) : row(data), stride(column_stride) {}
  __device__ __forceinline__ Bits Load(int64_t column, int64_t columns, bool) const {
    return LoadSome(row + column * stride, stride, 0, int(min(columns - column, int64_t(kVectorColumns))));
  }
  __device__ __forceinline__ Bf16x8 Value(const Bits& bits) const { return bits; }
};

template <>
struct OutputRow<kStrided> {
  Bf16* row;
  int64_t stride;

  __device__ __forceinline__ OutputRow(Bf16* data, int64_t column_stride) : row(data), stride(column_stride) {}
  __device__ __forceinline__ void Store(const Bf16x8& own, int64_t column, int64_t columns) const {
    StoreSome(own, row + column * stride, stride, 0, int(min(columns - column, int64_t(kVectorColumns))));
  }
};

// The fastest access that suits a view; null views, which are not there, suit each.
template <typename T>
inline Access BestAccess(const RowSpace& space, const RowView<T>& view) {
  if (view.data == nullptr) return kVector;
  if (view.column_stride != 1) return kStrided;
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.row_stride % kVectorColumns == 0;
  for (int d = 1; d < space.ndim; ++d) {
    aligned = aligned && space.inner_strides[view.inner][d - 1] % kVectorColumns == 0;
  }
  return aligned ? kVector : kShifted;
}

}  // namespace paddle_gated_ops
