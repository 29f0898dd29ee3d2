// The eager entry of the weighted SwiGLU backward, for module.cc.
#pragma once

#include <pybind11/pybind11.h>

namespace paddle_gated_ops {

// (do1, probs_grad, o2_s); None where an argument is a DistTensor, which the registered op serves.
pybind11::object FusedSwigluWeightedBwd(pybind11::handle o1, pybind11::handle do2_s, pybind11::handle unzipped_probs);

}  // namespace paddle_gated_ops
