// Times the CUDA kernels of both ops beside a copy of as many bytes: no Paddle, no Python. tools/bench_kernels.sh runs it.
//
// Buffers rotate over 600 MB, or 10000 sets of them, so that the L2 cache holds nothing of the next launch; each figure is
// the median of replays of a CUDA graph of launches. Before any timing the kernels' results are compared with the CPU
// kernels'.
//
// With the argument "cases" (tools/bench.py) it reads sizes from stdin, one a line: "swiglu ROWS COLUMNS OFFSET" or
// "norm ROWS 128 Z_STRIDE", with the arguments of BenchSwiglu and BenchNorm.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "common/vector.cuh"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate.h"
#include "swiglu_weighted/swiglu_weighted.h"

using namespace paddle_gated_ops;

#define CHECK(call)                                                                        \
  do {                                                                                     \
    const cudaError_t status_ = cudaError_t(call);                                         \
    if (status_ != cudaSuccess) {                                                          \
      std::fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
      std::exit(1);                                                                        \
    }                                                                                      \
  } while (0)

// Sums of four uniform numbers in (-1, 1), scaled to a variance of 1.
__global__ void Fill(Bf16* out, int64_t count, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x) {
    uint64_t state = (i + seed) * 0x9e3779b97f4a7c15ull;
    float sum = 0;
    for (int k = 0; k < 4; ++k) {
      state ^= state >> 27, state *= 0x94d049bb133111ebull, state ^= state >> 31;
      sum += float(uint32_t(state)) * 0x1p-31f - 1.0f;
    }
    out[i] = FloatToBf16(sum * 0.866f);
  }
}

__global__ void Copy(const uint4* in, uint4* out, int64_t count) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < count) __stcs(out + i, in[i]);
}

__global__ void Empty() {}

template <typename T>
T* Allocate(int64_t count) {
  void* pointer;
  CHECK(cudaMalloc(&pointer, count * sizeof(T)));
  CHECK(cudaMemset(pointer, 0xff, count * sizeof(T)));
  return static_cast<T*>(pointer);
}

Bf16* Random(int64_t count, uint64_t seed) {
  Bf16* pointer = Allocate<Bf16>(count);
  Fill<<<1024, 256>>>(pointer, count, seed << 40);
  return pointer;
}

template <typename T>
std::vector<T> ToHost(const T* from, int64_t count) {
  std::vector<T> host(count);
  CHECK(cudaMemcpy(host.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

// The median time of one launch in microseconds; launch(i) uses buffer set i.
double Time(int sets, double bytes, const std::function<void(int, cudaStream_t)>& launch) {
  cudaStream_t stream;
  CHECK(cudaStreamCreate(&stream));
  const int launches = std::max(sets, int(std::min(200.0, 2e9 / std::max(bytes, 1e6))));
  launch(0, stream);
  CHECK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) launch(i % sets, stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int repeat = 0; repeat < 13; ++repeat) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (repeat >= 2) times.push_back(ms);
  }
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2] * 1e3 / launches;
}

int Sets(double bytes) { return int(std::clamp(std::ceil(6e8 / bytes), 1.0, 10000.0)); }

// Each element of `device` within two BF16 steps of `host`, or both near zero.
void CompareBf16(const char* name, const std::vector<Bf16>& device, const std::vector<Bf16>& host) {
  for (size_t i = 0; i < host.size(); ++i) {
    const float a = Bf16ToFloat(device[i]), b = Bf16ToFloat(host[i]);
    if (!(std::fabs(a - b) <= 0.016f * std::fabs(b) + 1e-5f)) {
      std::fprintf(stderr, "%s[%zu]: GPU %g, CPU %g\n", name, i, a, b);
      std::exit(1);
    }
  }
}

void Report(const std::string& op, int64_t rows, int64_t columns, double bytes, double us, double copy_us) {
  std::printf(
      "{\"op\": \"%s\", \"rows\": %lld, \"columns\": %lld, \"us\": %.2f, \"TB/s\": %.3f, \"copy_us\": %.2f, "
      "\"of_copy\": %.3f}\n",
      op.c_str(), (long long)rows, (long long)columns, us, bytes / us * 1e-6, copy_us, copy_us / us);
  std::fflush(stdout);
}

double TimeCopy(double bytes) {
  const int sets = Sets(bytes);
  const int64_t count = std::max<int64_t>(1, int64_t(bytes / 2 / 16));
  std::vector<uint4*> in, out;
  for (int i = 0; i < sets; ++i) in.push_back(Allocate<uint4>(count)), out.push_back(Allocate<uint4>(count));
  const double kernel = Time(sets, bytes, [&](int i, cudaStream_t stream) {
    Copy<<<unsigned((count + 255) / 256), 256, 0, stream>>>(in[i], out[i], count);
  });
  const double memcpy_us = Time(sets, bytes, [&](int i, cudaStream_t stream) {
    CHECK(cudaMemcpyAsync(out[i], in[i], count * 16, cudaMemcpyDeviceToDevice, stream));
  });
  for (int i = 0; i < sets; ++i) {
    CHECK(cudaFree(in[i]));
    CHECK(cudaFree(out[i]));
  }
  return std::min(kernel, memcpy_us);
}

void BenchSwiglu(int64_t rows, int64_t columns, int64_t offset = 0) {
  const double bytes = 12.0 * rows * columns + 8.0 * rows;
  const int sets = Sets(bytes);
  std::vector<SwigluWeightedBwdParams> params(sets);
  for (int i = 0; i < sets; ++i) {
    SwigluWeightedBwdParams& p = params[i];
    p.space = {rows, 1, {rows}};
    p.intermediate_size = columns;
    p.clamp = INFINITY;
    Bf16 *o1 = Random(2 * rows * columns + offset, 3 * i) + offset, *do1 = Allocate<Bf16>(2 * rows * columns);
    p.gate = {o1, 1, 2 * columns}, p.up = {o1 + columns, 1, 2 * columns};
    p.output_grad = {Random(rows * columns, 3 * i + 1), 1, columns};
    std::vector<float> probs(rows);
    for (int64_t r = 0; r < rows; ++r) probs[r] = float(r % 97 + 1) / 97;
    float* device_probs = Allocate<float>(rows);
    CHECK(cudaMemcpy(device_probs, probs.data(), rows * 4, cudaMemcpyHostToDevice));
    p.probs = {device_probs, 1, 1};
    p.gate_grad = {do1, 1, 2 * columns}, p.up_grad = {do1 + columns, 1, 2 * columns};
    p.output = {Allocate<Bf16>(rows * columns), 1, columns};
    p.probs_grad = {Allocate<float>(rows), 1, 1};
  }
  const auto launch = [&](int i, cudaStream_t stream) { CHECK(LaunchSwigluWeightedBwdCuda(params[i], 0, stream)); };
  {
    launch(0, nullptr);
    const SwigluWeightedBwdParams& p = params[0];
    const int64_t some = std::min<int64_t>(rows, 64);
    std::vector<Bf16> o1 = ToHost(p.gate.data, 2 * some * columns), d = ToHost(p.output_grad.data, some * columns);
    std::vector<Bf16> do1(2 * some * columns), o2(some * columns);
    std::vector<float> probs = ToHost(p.probs.data, some), probs_grad(some);
    SwigluWeightedBwdParams h = p;
    h.space = {some, 1, {some}};
    h.gate.data = o1.data(), h.up.data = o1.data() + columns, h.output_grad.data = d.data(), h.probs.data = probs.data();
    h.gate_grad.data = do1.data(), h.up_grad.data = do1.data() + columns, h.output.data = o2.data();
    h.probs_grad.data = probs_grad.data();
    LaunchSwigluWeightedBwdCpu(h);
    CompareBf16("do1", ToHost(p.gate_grad.data, 2 * some * columns), do1);
    CompareBf16("o2_s", ToHost(p.output.data, some * columns), o2);
    const std::vector<float> got = ToHost(p.probs_grad.data, some);
    for (int64_t r = 0; r < some; ++r) {
      if (!(std::fabs(got[r] - probs_grad[r]) <= 1e-3f)) std::fprintf(stderr, "probs_grad[%d]\n", int(r)), std::exit(1);
    }
  }
  const double us = Time(sets, bytes, launch);
  const double forward_us = Time(sets, bytes / 2, [&](int i, cudaStream_t stream) {
    const SwigluWeightedBwdParams& p = params[i];
    SwigluWeightedFwdParams forward = {};
    forward.intermediate_size = columns, forward.clamp = p.clamp, forward.space = p.space;
    forward.gate = p.gate, forward.up = p.up, forward.probs = p.probs, forward.output = p.output;
    CHECK(LaunchSwigluWeightedFwdCuda(forward, 0, stream));
  });
  for (SwigluWeightedBwdParams& p : params) {
    for (const void* pointer :
         {(const void*)(p.gate.data - offset), (const void*)p.output_grad.data, (const void*)p.probs.data,
          (const void*)p.gate_grad.data, (const void*)p.output.data, (const void*)p.probs_grad.data}) {
      CHECK(cudaFree(const_cast<void*>(pointer)));
    }
  }
  const std::string suffix = offset == 0 ? "" : " unaligned";
  Report("swiglu_weighted_bwd" + suffix, rows, columns, bytes, us, TimeCopy(bytes));
  Report("swiglu_weighted" + suffix, rows, columns, bytes / 2, forward_us, TimeCopy(bytes / 2));
}

// `z_stride`: z as a column slice of rows this long.
void BenchNorm(int64_t rows, int64_t z_stride = kNormSize) {
  const double bytes = 10.0 * rows * kNormSize;
  const int sets = Sets(bytes);
  const int64_t count = rows * kNormSize;
  std::vector<RmsNormSiluGateBwdParams> params(sets);
  Bf16* weight = Random(kNormSize, 999999);
  for (int i = 0; i < sets; ++i) {
    RmsNormSiluGateBwdParams& p = params[i];
    p.space = {rows, 1, {rows}};
    p.eps = 1e-6f;
    p.output_grad = {Random(count, 3 * i), 1, kNormSize};
    p.x = {Random(count, 3 * i + 1), 1, kNormSize};
    p.gate = {Random(rows * z_stride, 3 * i + 2), 1, z_stride};
    p.weight = weight, p.weight_stride = 1;
    p.x_grad = {Allocate<Bf16>(count), 1, kNormSize};
    p.gate_grad = {Allocate<Bf16>(count), 1, kNormSize};
    p.weight_grad_fp32 = Allocate<float>(kNormSize), p.weight_grad_stride = 1;
    p.chunk_sums = Allocate<double>(WorkspaceBytes(rows) / 8 + 1);
  }
  const auto launch = [&](int i, cudaStream_t stream) { CHECK(LaunchRmsNormSiluGateBwdCuda(params[i], 0, stream)); };
  {
    launch(0, nullptr);
    const RmsNormSiluGateBwdParams& p = params[0];
    const int64_t some = std::min<int64_t>(rows, 256);
    std::vector<Bf16> d = ToHost(p.output_grad.data, some * kNormSize), x = ToHost(p.x.data, some * kNormSize),
                      z = ToHost(p.gate.data, some * z_stride), w = ToHost(weight, kNormSize);
    std::vector<Bf16> x_grad(some * kNormSize), gate_grad(some * kNormSize);
    RmsNormSiluGateBwdParams h = p;
    h.space = {some, 1, {some}};
    h.output_grad.data = d.data(), h.x.data = x.data(), h.gate.data = z.data(), h.weight = w.data();
    h.x_grad.data = x_grad.data(), h.gate_grad.data = gate_grad.data();
    std::vector<float> weight_grad(kNormSize);
    std::vector<double> chunk_sums(WorkspaceBytes(some) / 8 + 1);
    h.weight_grad_fp32 = weight_grad.data(), h.chunk_sums = chunk_sums.data();
    LaunchRmsNormSiluGateBwdCpu(h);
    CompareBf16("grad_x", ToHost(p.x_grad.data, some * kNormSize), x_grad);
    CompareBf16("grad_z", ToHost(p.gate_grad.data, some * kNormSize), gate_grad);
    const std::vector<float> got = ToHost(p.weight_grad_fp32, kNormSize);
    for (int i = 0; i < kNormSize && some == rows; ++i) {
      if (!(std::fabs(got[i] - weight_grad[i]) <= 1e-3f)) std::fprintf(stderr, "grad_weight[%d]\n", i), std::exit(1);
    }
  }
  const double us = Time(sets, bytes, launch);
  const double forward_us = Time(sets, 0.6 * bytes, [&](int i, cudaStream_t stream) {
    const RmsNormSiluGateBwdParams& p = params[i];
    RmsNormSiluGateFwdParams forward = {};
    forward.eps = p.eps, forward.space = p.space, forward.x = p.x, forward.gate = p.gate;
    forward.weight = p.weight, forward.weight_stride = p.weight_stride, forward.output = p.x_grad;
    CHECK(LaunchRmsNormSiluGateFwdCuda(forward, 0, stream));
  });
  for (RmsNormSiluGateBwdParams& p : params) {
    for (const void* pointer :
         {(const void*)p.output_grad.data, (const void*)p.x.data, (const void*)p.gate.data, (const void*)p.x_grad.data,
          (const void*)p.gate_grad.data, (const void*)p.weight_grad_fp32, (const void*)p.chunk_sums}) {
      CHECK(cudaFree(const_cast<void*>(pointer)));
    }
  }
  CHECK(cudaFree(weight));
  const std::string suffix = z_stride == kNormSize ? "" : " z sliced";
  Report("rmsnorm_silu_gate_bwd" + suffix, rows, kNormSize, bytes, us, TimeCopy(bytes));
  Report("rmsnorm_silu_gate" + suffix, rows, kNormSize, 0.6 * bytes, forward_us, TimeCopy(0.6 * bytes));
}

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "all";
  if (which == "all" || which == "cases") {
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    std::printf("{\"gpu\": \"%s\", \"sm\": %d%d, \"multiprocessors\": %d, \"cuda\": %d}\n", properties.name,
                properties.major, properties.minor, properties.multiProcessorCount, CUDART_VERSION);
    const double us = Time(1, 1, [](int, cudaStream_t stream) { Empty<<<1, 32, 0, stream>>>(); });
    Report("empty kernel", 0, 0, 0, us, us);
  }
  if (which == "cases") {
    std::string kind;
    for (int64_t rows, columns, layout; std::cin >> kind >> rows >> columns >> layout;) {
      kind == "swiglu" ? BenchSwiglu(rows, columns, layout) : BenchNorm(rows, layout);
    }
    return 0;
  }
  if (which != "norm") {
    for (const auto& [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{8, 2048},
                                                                                {1024, 2048},
                                                                                {4096, 1536},
                                                                                {65536, 768},
                                                                                {131072, 1024},
                                                                                {65536, 1408},
                                                                                {131072, 1536},
                                                                                {65536, 2048},
                                                                                {60000, 3584},
                                                                                {32768, 7168}}) {
      BenchSwiglu(rows, columns);
    }
    if (which == "all") BenchSwiglu(65536, 2050), BenchSwiglu(65536, 2047), BenchSwiglu(65536, 2048, 1);
  }
  if (which != "swiglu") {
    for (const int64_t rows : {16, 64, 512, 4096, 32768, 131072, 524288, 2097152}) BenchNorm(rows);
    if (which == "all") BenchNorm(524288, 512);
  }
}
