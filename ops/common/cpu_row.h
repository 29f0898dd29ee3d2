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

#include "common/cpu_isa.h"
#include "common/numerics.h"
#include "common/row_space.h"

#if GATED_OPS_X86
#include <immintrin.h>
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

// Memory for a piece whose columns do not lie side by side, or that OutputPiece streams.
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
// hardware follows five or six streams badly. Twice as far where outputs are streamed: 3 to 5 % there, but a loss of 3 %
// where the caches hold the data.
constexpr int kPrefetchColumns = 1024;
constexpr int kStreamPrefetchColumns = 2048;
constexpr int PrefetchColumns(bool stream) { return stream ? kStreamPrefetchColumns : kPrefetchColumns; }

struct Place {
  int64_t rows, column;
};

// Finds the place `distance` columns further on, for rows of `columns` columns.
class Lookahead {
 public:
  GATED_OPS_INLINE Lookahead(int64_t columns, int64_t distance)
      : columns_(columns), rows_(distance / columns), rest_(distance % columns) {}

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

// From this traffic on, outputs go past the caches: more than most machines' hold, so nobody would find them there. Not
// fresh ones, whose pages the system clears as they are first written: what it leaves in the caches is overwritten there,
// and to go past them took 25 to 45 % longer.
constexpr int64_t kStreamBytes = int64_t(128) << 20;
inline bool StreamOutputs(int64_t bytes, bool fresh) { return bytes >= kStreamBytes && !fresh && StreamsPay(); }

// Writes a piece past the caches; no line is read to be overwritten. `to` begins a line.
GATED_OPS_INLINE void StreamPiece(Bf16* to, const PieceBuffer& from) {
#if GATED_OPS_X86
  for (int i = 0; i < kPieceColumns; i += 8) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_load_si128(reinterpret_cast<const __m128i*>(from.columns + i)));
  }
#else
  std::memcpy(to, from.columns, sizeof(from));
#endif
}

// After streams, before another thread is told of them.
GATED_OPS_INLINE void EndStreams() {
#if GATED_OPS_X86
  _mm_sfence();
#endif
}

// A row that is written, by OutputPiece. A null row drops what is written.
struct OutputRow {
  Bf16* row;
  int64_t stride;
  bool stream;             // its pieces are whole lines and go past the caches
  int64_t row_stride = 0;  // to the next row; for Prefetch alone

  GATED_OPS_INLINE OutputRow(Bf16* data, int64_t column_stride, bool may_stream, int64_t next_row = 0)
      : row(data),
        stride(column_stride),
        stream(may_stream && data != nullptr && column_stride == 1 && reinterpret_cast<uintptr_t>(data) % 64 == 0),
        row_stride(next_row) {}

  GATED_OPS_INLINE bool IsWholePiece(int count) const { return row != nullptr && stride == 1 && count == kPieceColumns; }
  GATED_OPS_INLINE void Scatter(int64_t begin, int count, const PieceBuffer& from) const {
    if (row == nullptr) return;
    for (int i = 0; i < count; ++i) row[(begin + i) * stride] = from[i];
  }
  GATED_OPS_INLINE void Prefetch(const Place& ahead) const {
    if (row != nullptr && stride == 1 && !stream) PrefetchPiece(row + ahead.rows * row_stride + ahead.column);
  }
};

// The columns [begin, begin + count) of a row that is written: Put() each word, then Finish(). Columns that do not lie side
// by side, and those that are streamed, wait in the buffer, which is the caller's: were it a member, compilers would take
// each word that is written for one of the members.
template <CpuIsaLevel kIsa>
struct OutputPiece {
  const OutputRow& row;
  const int64_t begin;
  const int count;
  PieceBuffer& buffer;
  Bf16Pair* const words;

  GATED_OPS_INLINE OutputPiece(const OutputRow& output, int64_t from, int columns, PieceBuffer& scratch)
      : row(output),
        begin(from),
        count(columns),
        buffer(scratch),
        words(reinterpret_cast<Bf16Pair*>(row.IsWholePiece(count) && !row.stream ? row.row + begin : buffer.columns)) {}

  GATED_OPS_INLINE void Put(int i, float first, float second) const { words[i] = PairOf(first, second); }
  GATED_OPS_INLINE void Finish() const {
    if (!row.IsWholePiece(count)) {
      row.Scatter(begin, count, buffer);
    } else if (row.stream) {
      StreamPiece(row.row + begin, buffer);
    }
  }
};

#if GATED_OPS_AVX512_BF16
// Rounds a piece with the instruction that there is for it, to the bits of PairOf. The instruction keeps what NaN there is,
// and makes 0 of what is below 2^-126: a piece with such a number is left to PairOf. Zeros among the results say that it may
// have one. They are looked for after the permutation: clang 19 compares BF16 numbers that come straight from the
// instruction one by one, at a twelfth of the speed.
GATED_OPS_TARGET_AVX512_BF16 inline void RoundPiece(const PieceFloats& floats, Bf16Pair* words, bool stream) {
  constexpr int kVectors = kPieceWords / 16, kSubnormal = 0x20;
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  const __m512i neighbours = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                                              23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  __m512 first[kVectors], second[kVectors];
  __m512i rounded[kVectors];
  __mmask16 ordered = 0xffff;
  __mmask32 nonzero = 0xffffffff;
  for (int i = 0; i < kVectors; ++i) {
    first[i] = _mm512_load_ps(floats[0] + 16 * i);
    second[i] = _mm512_load_ps(floats[1] + 16 * i);
    ordered = _mm512_mask_cmp_ps_mask(ordered, first[i], second[i], _CMP_ORD_Q);
    rounded[i] = _mm512_permutexvar_epi16(neighbours, (__m512i)_mm512_cvtne2ps_pbh(second[i], first[i]));
    nonzero = _mm512_mask_test_epi16_mask(nonzero, rounded[i], magnitude);
  }
  if (ordered != 0xffff || nonzero != 0xffffffff) {
    __mmask16 subnormal = 0;
    for (int i = 0; i < kVectors; ++i) {
      subnormal |= _mm512_fpclass_ps_mask(first[i], kSubnormal) | _mm512_fpclass_ps_mask(second[i], kSubnormal);
    }
    if (ordered != 0xffff || subnormal != 0) {
      for (int i = 0; i < kPieceWords; ++i) words[i] = PairOf(floats[0][i], floats[1][i]);
      return;
    }
  }
  for (int i = 0; i < kVectors; ++i) {
    __m512i* to = reinterpret_cast<__m512i*>(words + 16 * i);
    if (stream) {
      _mm512_stream_si512(to, rounded[i]);
    } else {
      _mm512_storeu_si512(to, rounded[i]);
    }
  }
}

// The rounding takes a fifth of the kernels' time otherwise.
template <>
struct OutputPiece<kAvx512Bf16> {
  const OutputRow& row;
  const int64_t begin;
  const int count;
  PieceBuffer& buffer;
  alignas(64) PieceFloats floats;

  GATED_OPS_INLINE OutputPiece(const OutputRow& output, int64_t from, int columns, PieceBuffer& scratch)
      : row(output), begin(from), count(columns), buffer(scratch) {}

  GATED_OPS_INLINE void Put(int i, float first, float second) {
    floats[0][i] = first;
    floats[1][i] = second;
  }
  GATED_OPS_INLINE void Finish() {
    const bool whole = row.IsWholePiece(count);
    RoundPiece(floats, reinterpret_cast<Bf16Pair*>(whole ? row.row + begin : buffer.columns), whole && row.stream);
    if (!whole) row.Scatter(begin, count, buffer);
  }
};
#endif

GATED_OPS_INLINE InputRow MakeRow(const RowSpace& space, const RowView<const Bf16>& view, const RowIndex& index) {
  return {RowPointer<false>(space, view, index), view.column_stride, NextRowStride(space, view)};
}
GATED_OPS_INLINE OutputRow MakeRow(const RowSpace& space, const RowView<Bf16>& view, const RowIndex& index, bool stream) {
  return {view.data == nullptr ? nullptr : RowPointer<false>(space, view, index), view.column_stride, stream,
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
