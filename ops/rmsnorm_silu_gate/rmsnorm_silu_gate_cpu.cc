#include <algorithm>
#include <cmath>

#include "common/cpu_isa.h"
#include "common/cpu_row.h"
#include "common/parallel_for.h"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate.h"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate_math.h"

namespace paddle_gated_ops {
namespace {

using FwdParams = RmsNormSiluGateFwdParams;
using BwdParams = RmsNormSiluGateBwdParams;

static_assert(kNormSize == kPieceColumns, "a row is a piece");
constexpr int64_t kForwardTaskRows = 256;

GATED_OPS_INLINE float Sum(const float* terms) {
  float lanes[kLanes];
  LaneSums(terms, lanes);
  return TreeSum(lanes);
}

// 1 / sqrt(mean(x^2) + eps) of a row.
GATED_OPS_INLINE float ReciprocalStd(const float* squares, float eps) {
  return 1.0f / std::sqrt(Sum(squares) * (1.0f / kNormSize) + eps);
}

template <CpuIsaLevel kIsa>
GATED_OPS_INLINE void Sigmoids(const Bf16Pair* gate, PieceFloats& sigmoids) {
  for (int i = 0; i < kPieceWords; ++i) {
    sigmoids[0][i] = Sigmoid<HasFma(kIsa)>(FirstOf(gate[i]));
    sigmoids[1][i] = Sigmoid<HasFma(kIsa)>(SecondOf(gate[i]));
  }
}

struct ForwardRows {
  template <CpuIsaLevel kIsa>
  static GATED_OPS_INLINE void Run(const FwdParams& p, bool stream, int64_t begin, int64_t end) {
    const Place ahead = {PrefetchColumns(stream) / kNormSize, 0};
    PieceBuffer weight_buffer, x_buffer, gate_buffer, output_buffer;
    const Bf16Pair* weight = InputRow{p.weight, p.weight_stride}.Piece(0, kNormSize, weight_buffer);
    for (int64_t r = begin; r < end; ++r) {
      const RowIndex index = MakeRowIndex<false>(p.space, r);
      const InputRow x_row = MakeRow(p.space, p.x, index), gate_row = MakeRow(p.space, p.gate, index);
      const OutputRow output_row = MakeRow(p.space, p.output, index, stream);
      for (const InputRow* row : {&x_row, &gate_row}) row->Prefetch(ahead);
      output_row.Prefetch(ahead);
      const Bf16Pair* x = x_row.Piece(0, kNormSize, x_buffer);
      const Bf16Pair* gate = gate_row.Piece(0, kNormSize, gate_buffer);
      OutputPiece<kIsa> output(output_row, 0, kNormSize, output_buffer);
      float squares[kPieceWords];
      for (int i = 0; i < kPieceWords; ++i) {
        const float first = FirstOf(x[i]), second = SecondOf(x[i]);
        squares[i] = MulAdd<HasFma(kIsa)>(first, first, second * second);
      }
      const float rstd = ReciprocalStd(squares, p.eps);
      PieceFloats s;
      Sigmoids<kIsa>(gate, s);
      GATED_OPS_INDEPENDENT
      for (int i = 0; i < kPieceWords; ++i) {
        const uint32_t n = x[i], g = gate[i], w = weight[i];
        output.Put(i, GatedNormForward(FirstOf(n) * rstd, FirstOf(g), FirstOf(w), s[0][i]),
                   GatedNormForward(SecondOf(n) * rstd, SecondOf(g), SecondOf(w), s[1][i]));
      }
      output.Finish();
    }
  }
};

// Where a row lies in each tensor.
struct RowPointers {
  const Bf16 *x, *output_grad, *gate;
  Bf16 *x_grad, *gate_grad;
};

template <bool kOneDim>
void FindRows(const BwdParams& p, int64_t begin, int64_t end, RowPointers* found) {
  for (int64_t r = begin; r < end; ++r, ++found) {
    const RowIndex index = MakeRowIndex<kOneDim>(p.space, r);
    const auto at = [&](const auto& view) {
      return view.data == nullptr ? nullptr : RowPointer<kOneDim>(p.space, view, index);
    };
    *found = {at(p.x), at(p.output_grad), at(p.gate), at(p.x_grad), at(p.gate_grad)};
  }
}

// The rows of a unit. Out of line: its integers would take registers from the loops, which then keep theirs in vectors.
__attribute__((noinline)) void FindRows(const BwdParams& p, int64_t unit, RowPointers* found) {
  const int64_t begin = unit * kUnitRows, end = std::min(begin + kUnitRows, p.space.rows);
  if (p.space.ndim == 1) {
    FindRows<true>(p, begin, end, found);
  } else {
    FindRows<false>(p, begin, end, found);
  }
}

GATED_OPS_INLINE void PrefetchRow(const BwdParams& p, bool stream, const RowPointers& at) {
  InputRow{at.x, p.x.column_stride}.Prefetch({0, 0});
  InputRow{at.output_grad, p.output_grad.column_stride}.Prefetch({0, 0});
  InputRow{at.gate, p.gate.column_stride}.Prefetch({0, 0});
  OutputRow(at.x_grad, p.x_grad.column_stride, stream).Prefetch({0, 0});
  OutputRow(at.gate_grad, p.gate_grad.column_stride, stream).Prefetch({0, 0});
}

// The gradients of a row, in three steps: the sums over a row, which are long chains of operations, are begun by one step
// and used by the next, so that another row's step has the time between.
template <CpuIsaLevel kIsa, bool kStream>
struct GradRow {
  static constexpr bool kFma = HasFma(kIsa);
  float rstd, mean_projection;
  alignas(64) PieceFloats n;  // x until Middle
  alignas(64) PieceFloats gate, s, weighted;
  const Bf16Pair* output_grad;
  PieceBuffer output_grad_buffer;

  GATED_OPS_INLINE void Begin(const BwdParams& p, const RowPointers& at) {
    PieceBuffer x_buffer, gate_buffer;
    const Bf16Pair* x_words = InputRow{at.x, p.x.column_stride}.Piece(0, kNormSize, x_buffer);
    const Bf16Pair* gate_words = InputRow{at.gate, p.gate.column_stride}.Piece(0, kNormSize, gate_buffer);
    output_grad = InputRow{at.output_grad, p.output_grad.column_stride}.Piece(0, kNormSize, output_grad_buffer);
    float squares[kPieceWords];
    GATED_OPS_INDEPENDENT
    for (int i = 0; i < kPieceWords; ++i) {
      const float first = FirstOf(x_words[i]), second = SecondOf(x_words[i]);
      n[0][i] = first;
      n[1][i] = second;
      squares[i] = MulAdd<kFma>(first, first, second * second);
    }
    rstd = ReciprocalStd(squares, p.eps);
    GATED_OPS_INDEPENDENT
    for (int i = 0; i < kPieceWords; ++i) {
      gate[0][i] = FirstOf(gate_words[i]);
      gate[1][i] = SecondOf(gate_words[i]);
      s[0][i] = Sigmoid<kFma>(gate[0][i]);
      s[1][i] = Sigmoid<kFma>(gate[1][i]);
    }
  }

  // Writes gate_grad; adds the row's share of the weight gradient to `weight_terms` where that is wanted.
  template <bool kWeightGrad>
  GATED_OPS_INLINE void Middle(const BwdParams& p, const RowPointers& at, const PieceFloats& weight,
                               PieceFloats& weight_terms) {
    const OutputRow gate_grad_row(at.gate_grad, p.gate_grad.column_stride, kStream);
    PieceBuffer gate_grad_buffer;
    OutputPiece<kIsa> gate_grad(gate_grad_row, 0, kNormSize, gate_grad_buffer);
    const Bf16Pair* output_grad_words = output_grad;
    const float r = rstd;
    float projections[kPieceWords];
    GATED_OPS_INDEPENDENT
    GATED_OPS_UNROLL_VECTORS
    for (int i = 0; i < kPieceWords; ++i) {
      const uint32_t d = output_grad_words[i];
      n[0][i] *= r;
      n[1][i] *= r;
      const GatedNormTerms first = GatedNormBackward<kFma>(FirstOf(d), n[0][i], gate[0][i], weight[0][i], s[0][i]);
      const GatedNormTerms second = GatedNormBackward<kFma>(SecondOf(d), n[1][i], gate[1][i], weight[1][i], s[1][i]);
      gate_grad.Put(i, first.gate_grad, second.gate_grad);
      weighted[0][i] = first.weighted;
      weighted[1][i] = second.weighted;
      projections[i] = MulAdd<kFma>(first.weighted, n[0][i], second.weighted * n[1][i]);
      if (kWeightGrad) {
        weight_terms[0][i] = MulAdd<kFma>(first.gated, n[0][i], weight_terms[0][i]);
        weight_terms[1][i] = MulAdd<kFma>(second.gated, n[1][i], weight_terms[1][i]);
      }
    }
    gate_grad.Finish();
    mean_projection = Sum(projections) * (1.0f / kNormSize);
  }

  // Writes x_grad.
  GATED_OPS_INLINE void End(const BwdParams& p, const RowPointers& at) const {
    const OutputRow x_grad_row(at.x_grad, p.x_grad.column_stride, kStream);
    PieceBuffer x_grad_buffer;
    OutputPiece<kIsa> x_grad(x_grad_row, 0, kNormSize, x_grad_buffer);
    const float r = rstd, mean = mean_projection;
    GATED_OPS_INDEPENDENT
    for (int i = 0; i < kPieceWords; ++i) {
      x_grad.Put(i, GatedNormInputGrad<kFma>(weighted[0][i], n[0][i], mean, r),
                 GatedNormInputGrad<kFma>(weighted[1][i], n[1][i], mean, r));
    }
    x_grad.Finish();
  }
};

// The units [begin, end) of 16 rows: FP32 inside a unit, FP64 over the units. Whether outputs are streamed is a constant
// here: asked at each row it took 4 % of the time.
template <CpuIsaLevel kIsa, bool kWeightGrad, bool kStream>
GATED_OPS_INLINE void Chunk(const BwdParams& p, int64_t begin, int64_t end, double* chunk_sums) {
  PieceFloats weight;
  {
    PieceBuffer buffer;
    const Bf16Pair* words = InputRow{p.weight, p.weight_stride}.Piece(0, kNormSize, buffer);
    for (int i = 0; i < kPieceWords; ++i) {
      weight[0][i] = FirstOf(words[i]);
      weight[1][i] = SecondOf(words[i]);
    }
  }
  constexpr int kAheadRows = PrefetchColumns(kStream) / kNormSize;
  static_assert(kAheadRows <= kUnitRows, "the pointers of two units are known");
  RowPointers pointers[2 * kUnitRows];  // of row r at r % (2 * kUnitRows)
  const auto at = [&](int64_t r) -> const RowPointers& { return pointers[r % (2 * kUnitRows)]; };
  const auto find = [&](int64_t unit) { FindRows(p, unit, pointers + unit % 2 * kUnitRows); };
  const int64_t first_row = begin * kUnitRows, last_row = std::min(end * kUnitRows, p.space.rows);
  GradRow<kIsa, kStream> rows[2];
  double sums[2][kPieceWords] = {};
  find(begin);
  rows[first_row % 2].Begin(p, at(first_row));
  for (int64_t unit = begin; unit < end; ++unit) {
    find(unit + 1);
    PieceFloats weight_terms = {};
    const int64_t last = std::min((unit + 1) * kUnitRows, p.space.rows);
    for (int64_t r = unit * kUnitRows; r < last; ++r) {
      GradRow<kIsa, kStream>& row = rows[r % 2];
      if (r + kAheadRows < p.space.rows) PrefetchRow(p, kStream, at(r + kAheadRows));
      row.template Middle<kWeightGrad>(p, at(r), weight, weight_terms);
      if (r + 1 < last_row) rows[(r + 1) % 2].Begin(p, at(r + 1));
      row.End(p, at(r));
    }
    if (kWeightGrad) {
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < kPieceWords; ++i) sums[half][i] += double(weight_terms[half][i]);
      }
    }
  }
  if (kWeightGrad) {
    for (int column = 0; column < kNormSize; ++column) chunk_sums[column] = sums[column % 2][column / 2];
  }
}

struct AnyChunk {
  template <CpuIsaLevel kIsa>
  static GATED_OPS_INLINE void Run(const BwdParams& p, bool stream, int64_t begin, int64_t end, double* chunk_sums) {
    if (chunk_sums == nullptr) {
      stream ? Chunk<kIsa, false, true>(p, begin, end, nullptr) : Chunk<kIsa, false, false>(p, begin, end, nullptr);
    } else {
      stream ? Chunk<kIsa, true, true>(p, begin, end, chunk_sums) : Chunk<kIsa, true, false>(p, begin, end, chunk_sums);
    }
  }
};

}  // namespace

void LaunchRmsNormSiluGateFwdCpu(const RmsNormSiluGateFwdParams& p) {
  const int64_t tasks = (p.space.rows + kForwardTaskRows - 1) / kForwardTaskRows;
  const int64_t bytes = p.space.rows * kNormSize * 6;
  const bool stream = StreamOutputs(bytes, p.fresh_outputs);
  const auto run = BestRun<ForwardRows, const FwdParams&, bool, int64_t, int64_t>();
  ParallelFor(tasks, bytes, [&](int64_t task) {
    const int64_t begin = task * kForwardTaskRows;
    run(p, stream, begin, std::min(begin + kForwardTaskRows, p.space.rows));
    if (stream) EndStreams();
  });
}

void LaunchRmsNormSiluGateBwdCpu(const RmsNormSiluGateBwdParams& p) {
  const int64_t units = UnitCount(p.space.rows);
  const int chunks = ChunkCount(p.space.rows);
  const int64_t bytes = p.space.rows * kNormSize * 10;
  const bool weight_grad = p.chunk_sums != nullptr, stream = StreamOutputs(bytes, p.fresh_outputs);
  const auto run = BestRun<AnyChunk, const BwdParams&, bool, int64_t, int64_t, double*>();
  ParallelFor(chunks, bytes, [&](int64_t chunk) {
    run(p, stream, ChunkBegin(units, chunks, int(chunk)), ChunkBegin(units, chunks, int(chunk) + 1),
        weight_grad ? p.chunk_sums + chunk * kNormSize : nullptr);
    if (stream) EndStreams();
  });
  if (!weight_grad) return;
  ParallelFor(1, 0, [&](int64_t) {
    double sums[kNormSize] = {};
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const double* chunk_sums = p.chunk_sums + int64_t(chunk) * kNormSize;
      for (int column = 0; column < kNormSize; ++column) sums[column] += chunk_sums[column];
    }
    for (int column = 0; column < kNormSize; ++column) StoreWeightGrad(p, column, sums[column]);
  });
}

}  // namespace paddle_gated_ops
