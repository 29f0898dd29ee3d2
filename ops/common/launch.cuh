// Launching kernels from the host, with the launch's own status.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "common/device_guard.h"

namespace paddle_gated_ops {

// A kernel of ours may be launched while the one before it in the stream still ends (programmatic dependent launch; compute
// capability 9.0): an H200 gains 0.3 to 1 us each time. So every kernel begins with this: it returns when all that the
// stream had before is done, and its memory can be read and written.
__device__ __forceinline__ void WaitForEarlierKernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks come in as these leave. Only where it is one of ours, which waits as above.
__device__ __forceinline__ void LetNextKernelCome() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Whether the current device runs code of this kernel that has the instructions above, and not PTX of an older architecture.
template <typename Params>
bool WaitsForEarlierKernels(void (*kernel)(Params)) {
  constexpr int kDevices = 64;
  static std::atomic<signed char> known[kDevices];  // 0: not asked yet; all kernels of a library are compiled alike
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  if (known[device] == 0) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) != cudaSuccess) return false;
    known[device] = attributes.ptxVersion >= 90 ? 1 : -1;
  }
  return known[device] > 0;
}

// cudaLaunchKernelExC returns what went wrong with this launch. cudaGetLastError would also report, and clear, what an
// earlier launch of somebody else left behind.
template <typename Params>
cudaError_t LaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block, const Params& params, void* stream) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = WaitsForEarlierKernels(kernel) ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

}  // namespace paddle_gated_ops
