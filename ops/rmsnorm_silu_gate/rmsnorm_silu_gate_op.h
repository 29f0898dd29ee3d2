// What module.cc exports of the gated RMSNorm backward.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace paddle_gated_ops {

// (grad_x, grad_z, grad_weight); None where an argument is a DistTensor, which the registered op serves.
pybind11::object CakeRmsNormSiluGateTrainBackward(pybind11::handle grad_out, pybind11::handle x, pybind11::handle z,
                                                  pybind11::handle weight, pybind11::handle eps, pybind11::handle grad_x,
                                                  pybind11::handle grad_z, pybind11::handle grad_weight,
                                                  pybind11::handle accumulate_grad_weight,
                                                  pybind11::handle compute_grad_weight, pybind11::handle workspace);

// ValueError where shapes of a graph's variables, -1 for unknown sizes, can't fit: before anything goes into the program.
void CheckRmsNormSiluGateShapes(const std::vector<int64_t>& grad_out, const std::vector<int64_t>& x,
                                const std::vector<int64_t>& z, const std::vector<int64_t>& weight);

// eps as the kernels take it: finite, not negative, rounded to FP32.
double CheckedEps(pybind11::handle eps);

int64_t RmsNormSiluGateWorkspaceBytes(int64_t rows);

}  // namespace paddle_gated_ops
