// What the kernels of weighted SwiGLU are given, and their launchers. Stands alone: no Paddle.
#pragma once

#include "common/numerics.h"
#include "common/row_space.h"

namespace paddle_gated_ops {

struct SwigluWeightedFwdParams {
  int64_t intermediate_size;  // I
  float clamp;                // gate to at most this, up to at most this in magnitude; +Inf for none
  bool fresh_outputs;         // its memory is new and has never been written
  // Inputs
  RowView<const Bf16> gate;    // [rows, I], o1's left half
  RowView<const Bf16> up;      // [rows, I], o1's right half
  RowView<const float> probs;  // [rows], column_stride unused
  // Output
  RowView<Bf16> output;  // [rows, I], o2_s
  RowSpace space;        // the rows
};

struct SwigluWeightedBwdParams {
  int64_t intermediate_size;
  float clamp;
  bool fresh_outputs;  // as above, of do1 or o2_s
  // Inputs
  RowView<const Bf16> gate;
  RowView<const Bf16> up;
  RowView<const Bf16> output_grad;  // [rows, I], do2_s
  RowView<const float> probs;
  // Outputs; null data where one is not wanted
  RowView<Bf16> gate_grad;    // [rows, I], do1's left half
  RowView<Bf16> up_grad;      // [rows, I], do1's right half; null with gate_grad
  RowView<Bf16> output;       // [rows, I], o2_s
  RowView<float> probs_grad;  // [rows], column_stride unused
  RowSpace space;
};

void LaunchSwigluWeightedFwdCpu(const SwigluWeightedFwdParams& params);
void LaunchSwigluWeightedBwdCpu(const SwigluWeightedBwdParams& params);

// On `stream` of GPU `device`. Return the launch's cudaError_t; 0 is success.
int LaunchSwigluWeightedFwdCuda(const SwigluWeightedFwdParams& params, int device, void* stream);
int LaunchSwigluWeightedBwdCuda(const SwigluWeightedBwdParams& params, int device, void* stream);

}  // namespace paddle_gated_ops
