// Compares the CUDA kernels with the CPU kernels over small sizes and every way to lay rows out: no Paddle, no Python.
// tools/check_kernels.sh runs it, alone or under compute-sanitizer.
//
// Each tensor is a view into a buffer of its own: rows begin `offset` elements in and lie `pad` elements further apart than
// they are long, and columns lie `step` apart. What the views leave free is filled with canaries, which must survive.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "rmsnorm_silu_gate/rmsnorm_silu_gate.h"
#include "swiglu_weighted/swiglu_weighted.h"

using namespace paddle_gated_ops;

namespace {

constexpr Bf16 kCanary = 0x7f5a;
int g_checks = 0;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

void Check(int status) {
  if (status != cudaSuccess) Fail(cudaGetErrorString(cudaError_t(status)));
}

std::mt19937 g_random(0);

struct Layout {
  int offset, pad, step;
};

// A [rows, columns] tensor on both devices, in two leading dimensions where rows divide by 3.
struct Matrix {
  int64_t rows, columns;
  Layout layout;
  int64_t pitch;
  std::vector<Bf16> host;  // the buffer of the CPU's view
  Bf16* device;            // the buffer of the GPU's

  Matrix(int64_t rows, int64_t columns, Layout layout, bool output) : rows(rows), columns(columns), layout(layout) {
    pitch = columns * layout.step + layout.pad;
    host.assign(layout.offset + rows * pitch + 8, kCanary);
    if (!output) {
      std::normal_distribution<float> normal;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) host[Index(r, c)] = FloatToBf16(normal(g_random));
      }
    }
    Check(cudaMalloc(&device, host.size() * sizeof(Bf16)));
    Check(cudaMemcpy(device, host.data(), host.size() * sizeof(Bf16), cudaMemcpyHostToDevice));
  }
  ~Matrix() { cudaFree(device); }
  Matrix(const Matrix&) = delete;

  int64_t Index(int64_t r, int64_t c) const { return layout.offset + r * pitch + c * layout.step; }

  Bf16* Row(bool on_device) { return (on_device ? device : host.data()) + Index(0, 0); }

  // `number` is that of the space's strides that become this one's.
  template <typename T>
  RowView<T> View(bool on_device, RowSpace& space, int number, int64_t first_column = 0) {
    space.inner_strides[number][0] = pitch;
    const int64_t row_stride = space.ndim == 1 ? pitch : pitch * space.sizes[1];
    return {Row(on_device) + first_column * layout.step, layout.step, row_stride, number};
  }

  // The GPU's buffer against the CPU's: values within three BF16 steps, everything else to the bit.
  void Compare(const std::string& name) const {
    std::vector<Bf16> got(host.size());
    Check(cudaMemcpy(got.data(), device, got.size() * sizeof(Bf16), cudaMemcpyDeviceToHost));
    std::vector<bool> inside(host.size());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) inside[Index(r, c)] = true;
    }
    for (size_t i = 0; i < host.size(); ++i) {
      const float a = Bf16ToFloat(got[i]), b = Bf16ToFloat(host[i]);
      const bool equal = inside[i] ? std::fabs(a - b) <= 0.024f * std::fabs(b) + 1e-5f : got[i] == kCanary;
      if (!equal) Fail(name + " at " + std::to_string(i) + ": GPU " + std::to_string(a) + ", CPU " + std::to_string(b));
    }
    ++g_checks;
  }
};

template <typename T>
struct Vector {
  std::vector<T> host;
  T* device;
  Vector(int64_t count, T value) : host(count, value) {
    Check(cudaMalloc(&device, count * sizeof(T)));
    Check(cudaMemcpy(device, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Vector() { cudaFree(device); }
  Vector(const Vector&) = delete;
  T* At(bool on_device) { return on_device ? device : host.data(); }
  void Compare(const std::string& name, float scale) const {
    std::vector<T> got(host.size());
    Check(cudaMemcpy(got.data(), device, got.size() * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < host.size(); ++i) {
      if (!(std::fabs(got[i] - host[i]) <= 1e-5f * scale)) Fail(name + " at " + std::to_string(i));
    }
    ++g_checks;
  }
};

RowSpace Space(int64_t rows) {
  if (rows % 3 != 0) return {rows, 1, {rows}};
  return {rows, 2, {3, rows / 3}};
}

// Which results are asked for: the rows', the sum's, or both. The others' pointers are null.
enum Wanted { kAll, kRowsAlone, kSumAlone };

void CheckSwiglu(int64_t rows, int64_t columns, Layout in, Layout out, float clamp, Wanted wanted = kAll) {
  const std::string name = "swiglu_weighted rows " + std::to_string(rows) + " columns " + std::to_string(columns) +
                           " offset " + std::to_string(in.offset) + "/" + std::to_string(out.offset) + " step " +
                           std::to_string(in.step);
  Matrix o1(rows, 2 * columns, in, false), output_grad(rows, columns, in, false);
  Matrix do1(rows, 2 * columns, out, true), output(rows, columns, out, true), forward(rows, columns, out, true);
  Vector<float> probs(rows, 0.7f), probs_grad(rows, NAN);
  for (const bool gpu : {false, true}) {
    SwigluWeightedBwdParams p = {};
    RowSpace& space = p.space = Space(rows);
    p.intermediate_size = columns;
    p.clamp = clamp;
    p.gate = o1.View<const Bf16>(gpu, space, 0), p.up = o1.View<const Bf16>(gpu, space, 0, columns);
    p.output_grad = output_grad.View<const Bf16>(gpu, space, 1);
    if (wanted != kSumAlone) {
      p.gate_grad = do1.View<Bf16>(gpu, space, 2), p.up_grad = do1.View<Bf16>(gpu, space, 2, columns);
      p.output = output.View<Bf16>(gpu, space, 3);
    }
    const int64_t row_stride = space.ndim == 1 ? 1 : space.sizes[1];
    space.inner_strides[4][0] = 1;
    p.probs = {probs.At(gpu), 1, row_stride, 4};
    if (wanted != kRowsAlone) p.probs_grad = {probs_grad.At(gpu), 1, row_stride, 4};
    SwigluWeightedFwdParams f = {};
    f.intermediate_size = columns, f.clamp = clamp, f.space = space;
    f.gate = p.gate, f.up = p.up, f.probs = p.probs;
    f.output = forward.View<Bf16>(gpu, f.space, 5);
    if (gpu) {
      Check(LaunchSwigluWeightedBwdCuda(p, 0, nullptr));
      Check(LaunchSwigluWeightedFwdCuda(f, 0, nullptr));
    } else {
      LaunchSwigluWeightedBwdCpu(p);
      LaunchSwigluWeightedFwdCpu(f);
    }
  }
  do1.Compare(name + ": do1");
  output.Compare(name + ": o2_s");
  forward.Compare(name + ": forward");
  if (wanted != kRowsAlone) probs_grad.Compare(name + ": probs_grad", 10.0f * columns);
}

void CheckNorm(int64_t rows, Layout in, Layout out, Wanted wanted = kAll) {
  const std::string name = "rmsnorm_silu_gate rows " + std::to_string(rows) + " offset " + std::to_string(in.offset) + "/" +
                           std::to_string(out.offset) + " step " + std::to_string(in.step);
  Matrix grad_out(rows, kNormSize, in, false), x(rows, kNormSize, in, false), z(rows, kNormSize, in, false);
  Matrix weight(1, kNormSize, in, false);
  Matrix grad_x(rows, kNormSize, out, true), grad_z(rows, kNormSize, out, true), forward(rows, kNormSize, out, true);
  const bool accumulate = wanted == kSumAlone;
  Vector<float> grad_weight(kNormSize, accumulate ? 1.0f : NAN);
  Vector<double> chunk_sums(WorkspaceBytes(rows) / 8 + 1, NAN);
  for (const bool gpu : {false, true}) {
    RmsNormSiluGateBwdParams p = {};
    RowSpace& space = p.space = Space(rows);
    p.eps = 1e-6f;
    p.output_grad = grad_out.View<const Bf16>(gpu, space, 0), p.x = x.View<const Bf16>(gpu, space, 1);
    p.gate = z.View<const Bf16>(gpu, space, 2);
    p.weight = weight.Row(gpu), p.weight_stride = in.step;
    if (wanted != kSumAlone) {
      p.x_grad = grad_x.View<Bf16>(gpu, space, 3), p.gate_grad = grad_z.View<Bf16>(gpu, space, 4);
    }
    if (wanted != kRowsAlone) {
      p.weight_grad_fp32 = grad_weight.At(gpu), p.weight_grad_stride = 1;
      p.accumulate_weight_grad = accumulate;
      p.chunk_sums = chunk_sums.At(gpu);
    }
    RmsNormSiluGateFwdParams f = {};
    f.eps = p.eps, f.space = space, f.x = p.x, f.gate = p.gate;
    f.weight = p.weight, f.weight_stride = p.weight_stride;
    f.output = forward.View<Bf16>(gpu, f.space, 5);
    if (gpu) {
      Check(LaunchRmsNormSiluGateBwdCuda(p, 0, nullptr));
      Check(LaunchRmsNormSiluGateFwdCuda(f, 0, nullptr));
    } else {
      LaunchRmsNormSiluGateBwdCpu(p);
      LaunchRmsNormSiluGateFwdCpu(f);
    }
  }
  grad_x.Compare(name + ": grad_x");
  grad_z.Compare(name + ": grad_z");
  forward.Compare(name + ": forward");
  if (wanted != kRowsAlone) grad_weight.Compare(name + ": grad_weight", 10.0f * rows);
}

}  // namespace

int main() {
  const Layout layouts[] = {{0, 0, 1}, {8, 8, 1}, {1, 0, 1}, {3, 5, 1}, {7, 1, 1}, {2, 3, 2}};
  const float no_clamp = std::numeric_limits<float>::infinity();
  const int one_chunk = kUnitRows * kOneChunkUnits;  // the most rows that one launch takes
  for (const Layout in : layouts) {
    for (const Layout out : layouts) {
      for (const int64_t columns : {1, 2, 7, 8, 9, 66, 255, 256, 264, 512, 777, 1030, 1536, 2048, 2050, 2320})
        CheckSwiglu(5, columns, in, out, no_clamp);
      CheckSwiglu(9, 100, in, out, 0.5f);
      CheckSwiglu(300, 8, in, out, no_clamp);
      for (const int64_t rows : {1, 3, 16, 17, 50, one_chunk + 1, 3 * one_chunk}) CheckNorm(rows, in, out);
      for (const Wanted wanted : {kRowsAlone, kSumAlone}) {
        CheckSwiglu(9, 100, in, out, no_clamp, wanted);
        CheckSwiglu(5, 2048, in, out, no_clamp, wanted);
        for (const int64_t rows : {17, one_chunk + 1, 3 * one_chunk}) CheckNorm(rows, in, out, wanted);
      }
    }
  }
  for (const int64_t rows : {kUnitRows * kFewChunks + 1, int(kManyRows) + 17}) CheckNorm(rows, layouts[0], layouts[0]);
  CheckNorm(kManyRows + 1, layouts[2], layouts[3]);
  Check(cudaDeviceSynchronize());
  std::printf("%d comparisons with the CPU kernels passed\n", g_checks);
}
