// Launching kernels from the host, with the launch's own status.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <climits>

#include "common/device_guard.h"

namespace paddle_gated_ops {

// cudaLaunchKernelExC returns what went wrong with this launch. cudaGetLastError would also report, and clear, what an
// earlier launch of somebody else left behind.
template <typename Params>
cudaError_t LaunchKernel(void (*kernel)(Params), int64_t blocks, dim3 block, const Params& params, void* stream,
                         bool early = false) {
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

// A launch that follows one of ours may come while that one runs (programmatic dependent launch, from compute capability 9.0
// on), which takes 1 us off the pair. The first kernel's blocks begin with LetNextKernelCome: once all have, the second's
// come where there is room. They begin with WaitForKernelBefore: it returns when the first kernel is done and what it wrote
// can be read. Not after somebody else's launch, which may itself have come before what it follows was done.
__device__ __forceinline__ void LetNextKernelCome() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether the current device runs code of this kernel, the same in each call, that has these instructions: not PTX of an
// older architecture. Only drivers of CUDA 12.3 and later know such a pair in a graph.
static inline bool CanComeEarly(const void* kernel) {
  constexpr int kDevices = 64;
  static std::atomic<signed char> known[kDevices];  // 0: not asked yet
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  if (known[device] == 0) {
    cudaFuncAttributes attributes;
    int driver = 0;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return false;
    if (cudaDriverGetVersion(&driver) != cudaSuccess) return false;
    known[device] = attributes.ptxVersion >= 90 && driver >= 12030 ? 1 : -1;
  }
  return known[device] > 0;
}

template <typename Params>
cudaError_t LaunchAfterOurs(void (*kernel)(Params), int64_t blocks, dim3 block, const Params& params, void* stream) {
  return LaunchKernel(kernel, blocks, block, params, stream, CanComeEarly(reinterpret_cast<const void*>(kernel)));
}

}  // namespace paddle_gated_ops
