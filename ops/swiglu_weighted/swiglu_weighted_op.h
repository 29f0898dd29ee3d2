// What module.cc exports of weighted SwiGLU. Each entry returns None where an argument is a DistTensor, which the registered
// op serves. `function` is the public name, for messages; `clamp_value` is a float or None.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace paddle_gated_ops {

// The checks of FusedSwigluWeighted alone, those of DistTensors' shapes and dtypes aside.
void CheckFusedSwigluWeighted(pybind11::handle o1, pybind11::handle unzipped_probs, pybind11::handle clamp_value);

// o2_s
pybind11::object FusedSwigluWeighted(pybind11::handle o1, pybind11::handle unzipped_probs, pybind11::handle clamp_value);

// (do1, probs_grad, o2_s)
pybind11::object FusedSwigluWeightedBwd(pybind11::handle o1, pybind11::handle do2_s, pybind11::handle unzipped_probs);

// The same into the caller's tensors where they are not None; None for what is not wanted.
pybind11::object FusedSwigluWeightedBwdOut(const std::string& function, pybind11::handle o1, pybind11::handle do2_s,
                                           pybind11::handle unzipped_probs, pybind11::handle clamp_value,
                                           pybind11::handle do1, pybind11::handle probs_grad, pybind11::handle o2_s,
                                           bool want_do1, bool want_probs_grad, bool want_o2_s);

// A clamp as the registered ops take it: finite, above 0, rounded to FP32; 0 for None.
double CheckedClampValue(const std::string& function, pybind11::handle clamp_value);

// ValueError where shapes of a graph's variables, -1 for unknown sizes, can't fit: before anything goes into the program.
void CheckSwigluWeightedFwdShapes(const std::vector<int64_t>& o1, const std::vector<int64_t>& unzipped_probs);
void CheckSwigluWeightedBwdShapes(const std::vector<int64_t>& o1, const std::vector<int64_t>& do2_s,
                                  const std::vector<int64_t>& unzipped_probs);

}  // namespace paddle_gated_ops
