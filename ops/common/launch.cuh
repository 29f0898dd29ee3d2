// Launching kernels from the host: on the tensors' device, whichever is current, with the launch's own status.
#pragma once

#include <cuda_runtime.h>

namespace paddle_gated_ops {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    status_ = cudaGetDevice(&previous_);
    if (status_ == cudaSuccess && previous_ != device) {
      status_ = cudaSetDevice(device);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int previous_ = 0;
  bool changed_ = false;
  cudaError_t status_;
};

// cudaLaunchKernel returns what went wrong with this launch. cudaGetLastError would also report, and clear, what an
// earlier launch of somebody else left behind.
template <typename Params>
cudaError_t LaunchKernel(void (*kernel)(Params), dim3 grid, dim3 block, const Params& params, void* stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, arguments, 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace paddle_gated_ops
