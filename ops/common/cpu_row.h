// BF16 rows for the CPU kernels, in pieces of 128 columns, two columns at a time. Stands alone: no Paddle.
//
// A word of 32 bits holds two neighbouring columns, so that all of a loop over words has one lane width: the compiler needs
// no widening, narrowing or shuffling on any vector unit.
//
// How the loops are cut decides their speed. A loop whose iterations are one long chain of operations fills the CPU's
// scheduler with instructions that wait; the same work as two shorter loops, with what they hand over in the L1 cache, ran
// twice as fast. So the sigmoid, the longest chain, has a loop of its own.
#pragma once

#include <cstdint>

#include "common/numerics.h"
#include "common/row_space.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

// INDEPENDENT: the next loop's iterations read nothing that another one writes. NO_UNROLL: left as a loop for the
// vectorizer, which GCC would else unroll first and then not vectorize. UNROLL_VECTORS, after INDEPENDENT: four vectors at a
// time, for a body that is too long for GCC to do so by itself.
#if defined(__clang__)
#define GATED_OPS_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define GATED_OPS_NO_UNROLL
#define GATED_OPS_UNROLL_VECTORS
#elif defined(__GNUC__)
#define GATED_OPS_INDEPENDENT _Pragma("GCC ivdep")
#define GATED_OPS_NO_UNROLL _Pragma("GCC unroll 1")
#define GATED_OPS_UNROLL_VECTORS _Pragma("GCC unroll 4")
#else
#define GATED_OPS_INDEPENDENT
#define GATED_OPS_NO_UNROLL
#define GATED_OPS_UNROLL_VECTORS
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words of two BF16 columns are laid out for little-endian CPUs"
#endif

namespace paddle_gated_ops {

typedef uint32_t __attribute__((may_alias, aligned(2))) Bf16Pair;  // rows may begin at any BF16

constexpr int kPieceColumns = 128;
constexpr int kPieceWords = kPieceColumns / 2;

GATED_OPS_INLINE float FirstOf(uint32_t pair) { return BitsToFloat(pair << 16); }
GATED_OPS_INLINE float SecondOf(uint32_t pair) { return BitsToFloat(pair & 0xffff0000u); }
GATED_OPS_INLINE uint32_t PairOf(float first, float second) {
  return (RoundToUpperHalf(first) >> 16) | (RoundToUpperHalf(second) & 0xffff0000u);
}

// Floats of a piece: [0] of each word's first column, [1] of its second.
using PieceFloats = float[2][kPieceWords];

// Memory for a piece whose columns do not lie side by side, or that is streamed.
struct alignas(64) PieceBuffer {
  Bf16 columns[kPieceColumns];
  GATED_OPS_INLINE Bf16& operator[](int i) { return columns[i]; }
  GATED_OPS_INLINE Bf16 operator[](int i) const { return columns[i]; }
};

// Asks for a piece whose columns lie side by side.
GATED_OPS_INLINE void PrefetchPiece(const Bf16* piece) {
#ifdef __GNUC__
  constexpr int kLineColumns = 64 / int(sizeof(Bf16));
  for (int i = 0; i < kPieceColumns; i += kLineColumns) __builtin_prefetch(piece + i);
#endif
}

// How far ahead pieces are asked for, in their own row or in the ones after it: a fifth at sizes past the caches, where the
// hardware follows five or six streams badly.
constexpr int kPrefetchColumns = 1024;

struct Place {
  int64_t rows, column;
};

// Finds that place for rows of `columns` columns.
class Lookahead {
 public:
  GATED_OPS_INLINE explicit Lookahead(int64_t columns)
      : columns_(columns), rows_(kPrefetchColumns / columns), rest_(kPrefetchColumns % columns) {}

  GATED_OPS_INLINE Place From(int64_t column) const {
    const int64_t to = column + rest_;
    return to < columns_ ? Place{rows_, to} : Place{rows_ + 1, to - columns_};
  }

 private:
  const int64_t columns_, rows_, rest_;
};

// A row that is read: Piece() are its columns [begin, begin + count) as words, in place where they lie side by side, else
// gathered. Zeros stand past the row's end.
struct InputRow {
  const Bf16* row;
  int64_t stride;
  int64_t row_stride = 0;  // to the next row; for Prefetch alone

  GATED_OPS_INLINE const Bf16Pair* Piece(int64_t begin, int count, PieceBuffer& buffer) const {
    if (stride == 1 && count == kPieceColumns) return reinterpret_cast<const Bf16Pair*>(row + begin);
    for (int i = 0; i < count; ++i) buffer[i] = row[(begin + i) * stride];
    for (int i = count; i < kPieceColumns; ++i) buffer[i] = 0;
    return reinterpret_cast<const Bf16Pair*>(buffer.columns);
  }
  GATED_OPS_INLINE void Prefetch(const Place& ahead) const {
    if (row != nullptr && stride == 1) PrefetchPiece(row + ahead.rows * row_stride + ahead.column);
  }
};

// Writes a piece past the caches; no line is read to be overwritten. `to` begins a line.
GATED_OPS_INLINE void StreamPiece(Bf16* to, const PieceBuffer& from) {
#ifdef __SSE2__
  for (int i = 0; i < kPieceColumns; i += 8) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(from.columns + i)));
  }
#else
  std::memcpy(to, from.columns, sizeof(from));
#endif
}

// After streams, before another thread is told of them.
GATED_OPS_INLINE void EndStreams() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

// A row that is written: all words at Piece(), then Finish(), which scatters them where the columns do not lie side by side.
// A null row drops them.
struct OutputRow {
  Bf16* row;
  int64_t stride;
  int64_t row_stride = 0;
  bool stream = false;

  // Streams its pieces if they are whole lines.
  GATED_OPS_INLINE OutputRow Streamed() const {
    return {row, stride, row_stride, row != nullptr && stride == 1 && reinterpret_cast<uintptr_t>(row) % 64 == 0};
  }

  GATED_OPS_INLINE Bf16Pair* Piece(int64_t begin, int count, PieceBuffer& buffer) const {
    return reinterpret_cast<Bf16Pair*>(InPlace(count) && !stream ? row + begin : buffer.columns);
  }
  GATED_OPS_INLINE void Finish(int64_t begin, int count, const PieceBuffer& buffer) const {
    if (row == nullptr) return;
    if (InPlace(count)) {
      if (stream) StreamPiece(row + begin, buffer);
      return;
    }
    for (int i = 0; i < count; ++i) row[(begin + i) * stride] = buffer[i];
  }
  GATED_OPS_INLINE void Prefetch(const Place& ahead) const {
    if (row != nullptr && stride == 1 && !stream) PrefetchPiece(row + ahead.rows * row_stride + ahead.column);
  }

  GATED_OPS_INLINE bool InPlace(int count) const { return row != nullptr && stride == 1 && count == kPieceColumns; }
};

GATED_OPS_INLINE InputRow MakeRow(const RowSpace& space, const RowView<const Bf16>& view, const RowIndex& index) {
  return {RowPointer<false>(space, view, index), view.column_stride, NextRowStride(space, view)};
}
GATED_OPS_INLINE OutputRow MakeRow(const RowSpace& space, const RowView<Bf16>& view, const RowIndex& index) {
  return {view.data == nullptr ? nullptr : RowPointer<false>(space, view, index), view.column_stride,
          NextRowStride(space, view)};
}

// A piece's sums: one term a word, which holds its two columns' sum; four in sequence in each of 16 lanes.
constexpr int kLanes = 16;

GATED_OPS_INLINE void LaneSums(const float* terms, float* lanes) {
  GATED_OPS_NO_UNROLL
  for (int lane = 0; lane < kLanes; ++lane) {
    const float* term = terms + lane;
    lanes[lane] = ((term[0] + term[kLanes]) + term[2 * kLanes]) + term[3 * kLanes];
  }
}

// The sum over lanes, by a tree.
template <int kCount = kLanes, typename T>
GATED_OPS_INLINE T TreeSum(const T* lanes) {
  if constexpr (kCount == 1) {
    return lanes[0];
  } else {
    T half[kCount / 2];
    GATED_OPS_NO_UNROLL
    for (int i = 0; i < kCount / 2; ++i) half[i] = lanes[i] + lanes[i + kCount / 2];
    return TreeSum<kCount / 2>(half);
  }
}

}  // namespace paddle_gated_ops
