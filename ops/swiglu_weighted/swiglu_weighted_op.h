// What module.cc exports of the weighted SwiGLU backward.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace paddle_gated_ops {

// (do1, probs_grad, o2_s); None where an argument is a DistTensor, which the registered op serves.
pybind11::object FusedSwigluWeightedBwd(pybind11::handle o1, pybind11::handle do2_s, pybind11::handle unzipped_probs);

// ValueError where shapes of a graph's variables, -1 for unknown sizes, can't fit: before anything goes into the program.
void CheckSwigluWeightedShapes(const std::vector<int64_t>& o1, const std::vector<int64_t>& do2_s,
                               const std::vector<int64_t>& unzipped_probs);

}  // namespace paddle_gated_ops
