// What module.cc exports of gated RMSNorm. Each entry returns None where an argument is a DistTensor, which the registered
// op serves. `function` is the public name, for messages.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace paddle_gated_ops {

// The checks of CakeRmsNormSiluGate alone, those of DistTensors' shapes and dtypes aside, of a weight in BF16 or in FP32.
void CheckCakeRmsNormSiluGate(pybind11::handle x, pybind11::handle z, pybind11::handle weight, pybind11::handle eps,
                              bool fp32_weight);

// y, into `out` where that is not None
pybind11::object CakeRmsNormSiluGate(const std::string& function, pybind11::handle x, pybind11::handle z,
                                     pybind11::handle weight, pybind11::handle eps, pybind11::handle out);

// (grad_x, grad_z, grad_weight); None for what is not wanted.
pybind11::object CakeRmsNormSiluGateTrainBackward(pybind11::handle grad_out, pybind11::handle x, pybind11::handle z,
                                                  pybind11::handle weight, pybind11::handle eps, pybind11::handle grad_x,
                                                  pybind11::handle grad_z, pybind11::handle grad_weight,
                                                  pybind11::handle accumulate_grad_weight,
                                                  pybind11::handle compute_grad_weight, pybind11::handle workspace,
                                                  bool want_grad_x, bool want_grad_z);

// ValueError where shapes of a graph's variables, -1 for unknown sizes, can't fit: before anything goes into the program.
void CheckRmsNormSiluGateFwdShapes(const std::vector<int64_t>& x, const std::vector<int64_t>& z,
                                   const std::vector<int64_t>& weight);
void CheckRmsNormSiluGateBwdShapes(const std::vector<int64_t>& grad_out, const std::vector<int64_t>& x,
                                   const std::vector<int64_t>& z, const std::vector<int64_t>& weight);

// eps as the kernels take it: finite, not negative, rounded to FP32.
double CheckedEps(const std::string& function, pybind11::handle eps);

int64_t RmsNormSiluGateWorkspaceBytes(int64_t rows);

}  // namespace paddle_gated_ops
