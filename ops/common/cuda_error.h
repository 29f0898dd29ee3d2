// A CUDA status in words. Stands alone: no Paddle.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace paddle_gated_ops {

// The library has no code that this GPU, or its driver, could run.
inline bool IsForAnotherGpu(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         error == cudaErrorUnsupportedPtxVersion || error == cudaErrorInvalidPtx || error == cudaErrorJitCompilerNotFound;
}

// What a launch cannot cause itself: a kernel launched before, by whomever, has failed, and all calls say so from then on.
inline bool IsOfEarlierWork(cudaError_t error) {
  return error == cudaErrorIllegalAddress || error == cudaErrorLaunchTimeout || error == cudaErrorAssert ||
         error == cudaErrorHardwareStackError || error == cudaErrorIllegalInstruction ||
         error == cudaErrorMisalignedAddress || error == cudaErrorInvalidAddressSpace || error == cudaErrorInvalidPc ||
         error == cudaErrorLaunchFailure || error == cudaErrorECCUncorrectable;
}

// `gpu_code` is what the library is built for, such as "sm_80, sm_90".
inline std::string DescribeCudaError(cudaError_t error, int device, const std::string& gpu_code) {
  const std::string text = std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
  const std::string gpu = "GPU " + std::to_string(device);
  if (IsForAnotherGpu(error)) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    const std::string number = std::to_string(major) + "." + std::to_string(minor);
    return "paddle_gated_ops is built for " + gpu_code + ", but " + gpu + " is sm_" + std::to_string(10 * major + minor) +
           ": build it with PADDLE_CUDA_ARCH_LIST=" + number + " (" + text + ")";
  }
  if (IsOfEarlierWork(error)) return "earlier work on " + gpu + " has failed, that of another op perhaps (" + text + ")";
  return text;
}

}  // namespace paddle_gated_ops
