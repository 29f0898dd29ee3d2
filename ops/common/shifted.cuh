// Rows whose columns are neighbours and that begin anywhere: Access kShifted.
//
// They are read in aligned 32-bit words, and shifted by an element where the row begins in the middle of one. They are
// written in aligned 16 bytes, of which a thread's begin up to eight columns before its own: they hold the last columns of
// the thread before and the first of its own. So threads hand their results to their neighbours: lanes in shuffles, warps in
// shared memory.
#pragma once

#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace paddle_gated_ops {

// Left to itself the compiler takes these for generic addresses.
__device__ __forceinline__ uint32_t LoadGlobal(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}
__device__ __forceinline__ uint16_t LoadGlobal(const Bf16* from) {
  uint16_t value;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(value) : "l"(__cvta_generic_to_global(from)) : "memory");
  return value;
}

// Keeps a pointer in registers, where the compiler would work it out again in each round.
template <typename T>
__device__ __forceinline__ void Keep(T*& pointer) {
  asm("" : "+l"(pointer));
}

template <>
struct InputRow<kShifted> {
  struct Bits {
    uint32_t word[5];
  };
  using Column = int;
  const Bf16* row;  // rounded down to a whole word
  uint32_t bits;    // what rounding took off, in bits: 0 or 16

  __device__ __forceinline__ InputRow(const Bf16* data, int64_t)
      : row(reinterpret_cast<const Bf16*>(reinterpret_cast<uintptr_t>(data) & ~uintptr_t(3))),
        bits(uint32_t(reinterpret_cast<uintptr_t>(data)) % 4 * 8) {
    Keep(row);
  }

  // `inside`: the row has a ninth column. What shares column 0's word is read along, and not used.
  __device__ __forceinline__ Bits Load(int column, int columns, bool inside) const {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(row + column);
    Bits result = {};
    if (inside) {
#pragma unroll
      for (int i = 0; i < 4; ++i) result.word[i] = LoadGlobal(words + i);
      if (bits != 0) result.word[4] = LoadGlobal(words + 4);
    } else {
      const int count = columns > column ? columns - column + (bits != 0) : 0;  // elements from there to the row's end
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        if (2 * i + 2 <= count && (i < 4 || bits != 0)) result.word[i] = LoadGlobal(words + i);
        if (2 * i + 1 == count) result.word[i] = LoadGlobal(row + column + 2 * i);
      }
    }
    return result;
  }
  // Into the L2 cache.
  __device__ __forceinline__ void Prefetch(int column) const {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(row + column)));
  }
  __device__ __forceinline__ Bf16x8 Value(const Bits& loaded) const {
    Bf16x8 result;
#pragma unroll
    for (int i = 0; i < 4; ++i) result.pair[i] = __funnelshift_r(loaded.word[i], loaded.word[i + 1], bits);
    return result;
  }
};

template <>
struct OutputRow<kShifted> {
  Bf16* row;  // the row's start, rounded up to 16 bytes
  int shift;  // what rounding added, in elements: 0 to 7

  __device__ __forceinline__ OutputRow(Bf16* data, int64_t)
      : row(reinterpret_cast<Bf16*>((reinterpret_cast<uintptr_t>(data) + 15) & ~uintptr_t(15))),
        shift(int(-(reinterpret_cast<uintptr_t>(data) / 2) & 7)) {
    Keep(row);
  }

  // Stores the 16 bytes that begin 8 - shift columns before the thread's own, as far as they are in the row.
  __device__ __forceinline__ void Store(const Bf16x8& before, const Bf16x8& own, int column, int columns) const {
    uint32_t w[8] = {before.pair[0], before.pair[1], before.pair[2], before.pair[3],
                     own.pair[0],    own.pair[1],    own.pair[2],    own.pair[3]};
    if (shift & 4) {
#pragma unroll
      for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
    }
    if (shift & 2) {
#pragma unroll
      for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
    }
    Bf16x8 joined;
#pragma unroll
    for (int i = 0; i < 4; ++i) joined.pair[i] = __funnelshift_r(w[i], w[i + 1], shift << 4);
    Bf16* to = row + (column - kVectorColumns);
    const int begin = column == 0 ? kVectorColumns - shift : 0, end = columns - column + kVectorColumns - shift;
    if (column != 0 && end >= kVectorColumns) {
      StoreAligned(joined, to);
    } else if (begin < end) {
      StoreSome(joined, to, 1, begin, end);
    }
  }
  // What Store leaves to the thread after, where there is none.
  __device__ __forceinline__ void StoreRest(const Bf16x8& own, int column, int columns) const {
    StoreSome(own, row + (column - shift), 1, shift, columns - column);
  }
};

__device__ __forceinline__ void StoreShared(const Bf16x8& value, uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(value.pair[0]), "r"(value.pair[1]),
               "r"(value.pair[2]), "r"(value.pair[3])
               : "memory");
}
__device__ __forceinline__ Bf16x8 LoadShared(uint32_t address) {
  Bf16x8 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.pair[0]), "=r"(value.pair[1]), "=r"(value.pair[2]), "=r"(value.pair[3])
               : "r"(address)
               : "memory");
  return value;
}

// The columns of the lane before; the whole warp must call it.
__device__ __forceinline__ Bf16x8 LaneBefore(const Bf16x8& own) {
  Bf16x8 before;
#pragma unroll
  for (int i = 0; i < 4; ++i) before.pair[i] = __shfl_up_sync(kFullWarp, own.pair[i], 1);
  return before;
}

// What the threads of a row hand to the one after, round by round; blockDim is {threads of a row, rows}, with rows of more
// than a warp alone in their block. Lanes hand in shuffles, warps in shared memory.
template <int kTensors, int kMaxWarps>
class Neighbours {
 public:
  // What a warp's last lane has in a round. A slot is written again three rounds later, when no warp reads it any more.
  using Slots = Bf16x8[3][kMaxWarps][kTensors];

  __device__ __forceinline__ explicit Neighbours(Slots& slots)
      : warp_(uint32_t(__cvta_generic_to_shared(slots[0][(threadIdx.y * blockDim.x + threadIdx.x) / 32]))) {
    asm("" : "+r"(warp_));  // kept in a register
  }

  // The whole block must call it, once a round.
  __device__ __forceinline__ void Publish(const Bf16x8 (&own)[kTensors]) {
    const uint32_t previous = now_;
    now_ = now_ == 2 * kRound ? 0 : now_ + kRound;
    if (threadIdx.x % 32 == 31) {
#pragma unroll
      for (int i = 0; i < kTensors; ++i) StoreShared(own[i], warp_ + now_ + i * sizeof(Bf16x8));
    }
    if (blockDim.x > 32) {
      __syncthreads();
    } else {
      __syncwarp();
    }
    before_ = warp_ + (threadIdx.x >= 32 ? now_ - kWarp : previous + (blockDim.x - 1) / 32 * kWarp);
  }
  // The columns of the thread before; for the row's first thread those of its last in the round before.
  __device__ __forceinline__ Bf16x8 Before(int tensor, const Bf16x8& own) const {
    Bf16x8 before = LaneBefore(own);
    if (threadIdx.x % 32 == 0) before = LoadShared(before_ + tensor * sizeof(Bf16x8));
    return before;
  }

 private:
  static constexpr uint32_t kWarp = kTensors * sizeof(Bf16x8), kRound = kMaxWarps * kWarp;
  uint32_t warp_, now_ = 0, before_ = 0;  // addresses and offsets in shared memory
};

}  // namespace paddle_gated_ops
