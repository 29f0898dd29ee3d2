// Launching kernels from the host, with the launch's own status.
#pragma once

#include <cuda_runtime.h>

#include "common/device_guard.h"

namespace paddle_gated_ops {

// cudaLaunchKernel returns what went wrong with this launch. cudaGetLastError would also report, and clear, what an
// earlier launch of somebody else left behind.
template <typename Params>
cudaError_t LaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block, const Params& params, void* stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace paddle_gated_ops
