// What paddle_gated_ops._C exports to Python. The registered ops of the same library are Paddle's to load.
#include <pybind11/stl.h>

#include "common/cpu_isa.h"
#include "common/paddle_glue.h"
#include "common/paddle_glue_no_gradient.h"
#include "common/parallel_for.h"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate_op.h"
#include "swiglu_weighted/swiglu_weighted_op.h"

PYBIND11_MODULE(_C, m) {
  m.def("fused_swiglu_weighted", &paddle_gated_ops::FusedSwigluWeighted);
  m.def("fused_swiglu_weighted_bwd", &paddle_gated_ops::FusedSwigluWeightedBwd);
  m.def("fused_swiglu_weighted_bwd_out", &paddle_gated_ops::FusedSwigluWeightedBwdOut);
  m.def("check_fused_swiglu_weighted", &paddle_gated_ops::CheckFusedSwigluWeighted);
  m.def("check_fused_swiglu_weighted_shapes", &paddle_gated_ops::CheckSwigluWeightedFwdShapes);
  m.def("check_fused_swiglu_weighted_bwd_shapes", &paddle_gated_ops::CheckSwigluWeightedBwdShapes);
  m.def("checked_clamp_value", &paddle_gated_ops::CheckedClampValue);

  m.def("cake_rmsnorm_silu_gate", &paddle_gated_ops::CakeRmsNormSiluGate);
  m.def("cake_rmsnorm_silu_gate_train_backward", &paddle_gated_ops::CakeRmsNormSiluGateTrainBackward);
  m.def("cake_rmsnorm_silu_gate_train_backward_workspace_bytes", &paddle_gated_ops::RmsNormSiluGateWorkspaceBytes);
  m.def("check_cake_rmsnorm_silu_gate", &paddle_gated_ops::CheckCakeRmsNormSiluGate);
  m.def("check_cake_rmsnorm_silu_gate_shapes", &paddle_gated_ops::CheckRmsNormSiluGateFwdShapes);
  m.def("check_cake_rmsnorm_silu_gate_train_backward_shapes", &paddle_gated_ops::CheckRmsNormSiluGateBwdShapes);
  m.def("checked_eps", &paddle_gated_ops::CheckedEps);

  m.def("no_gradient_tensor", &paddle_gated_ops::MakeNoGradientTensor);
  m.def("any_dist", &paddle_gated_ops::AnyDistTensor);
  m.def("check_tensor", &paddle_gated_ops::CheckTensorArgument);
  m.def("set_num_threads", &paddle_gated_ops::SetNumThreads);
  m.def("get_num_threads", &paddle_gated_ops::NumThreads);
  m.def("cpu_path", [] { return paddle_gated_ops::kCpuIsaNames[paddle_gated_ops::CpuIsa()]; });
#ifdef PADDLE_GATED_OPS_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
}
