// What the kernels of the weighted SwiGLU backward are given, and their launchers. Stands alone: no Paddle.
#pragma once

#include "common/numerics.h"
#include "common/row_space.h"

namespace paddle_gated_ops {

struct SwigluWeightedBwdParams {
  RowSpace space;             // the rows
  int64_t intermediate_size;  // I
  // Inputs
  RowView<const Bf16> gate;         // [rows, I], o1's left half
  RowView<const Bf16> up;           // [rows, I], o1's right half
  RowView<const Bf16> output_grad;  // [rows, I], do2_s
  RowView<const float> probs;       // [rows], column_stride unused
  // Outputs
  RowView<Bf16> gate_grad;    // [rows, I], do1's left half
  RowView<Bf16> up_grad;      // [rows, I], do1's right half
  RowView<Bf16> output;       // [rows, I], o2_s
  RowView<float> probs_grad;  // [rows], column_stride unused
};

void LaunchSwigluWeightedBwdCpu(const SwigluWeightedBwdParams& params);

// On `stream` of GPU `device`. Returns the launch's cudaError_t; 0 is success.
int LaunchSwigluWeightedBwdCuda(const SwigluWeightedBwdParams& params, int device, void* stream);

}  // namespace paddle_gated_ops
