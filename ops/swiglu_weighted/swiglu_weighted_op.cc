#include "swiglu_weighted/swiglu_weighted_op.h"

#include "common/paddle_glue.h"
#include "swiglu_weighted/swiglu_weighted.h"

namespace paddle_gated_ops {
namespace {

constexpr char kFunction[] = "fused_swiglu_weighted_bwd";

using Shape = std::vector<int64_t>;

// o1 [..., 2I], do2_s [..., I], unzipped_probs [...] or [..., 1].
void CheckShapes(const Dims& o1, const Dims& do2_s, const Dims& probs) {
  if (o1.rank < 1) ThrowValueError("o1 must have shape [..., 2 * intermediate_size], but has []");
  if (o1.last() != kUnknown && o1.last() % 2 != 0) {
    ThrowValueError(Text("o1 must have an even last dimension (gate and up side by side), but has shape ", ToString(o1)));
  }
  Dims expected = o1;
  expected.at[o1.rank - 1] = o1.last() == kUnknown ? kUnknown : o1.last() / 2;
  CheckShape("do2_s", do2_s, expected, "o1's with half the last dimension");

  Dims rows = o1;
  rows.rank -= 1;
  Dims column = o1;
  column.at[o1.rank - 1] = 1;
  if (!Matches(probs, rows) && !Matches(probs, column)) {
    ThrowValueError(Text("unzipped_probs must have shape ", ToString(rows), " or ", ToString(column),
                         " (one probability a row of o1), but has ", ToString(probs)));
  }
}

void CheckShapes(const Shape& o1, const Shape& do2_s, const Shape& probs) {
  CheckShapes(MakeDims("o1", o1), MakeDims("do2_s", do2_s), MakeDims("unzipped_probs", probs));
}

struct Outputs {
  paddle::Tensor do1, probs_grad, o2_s;
};

Outputs Backward(const paddle::Tensor& o1_tensor, const paddle::Tensor& do2_s_tensor,
                 const paddle::Tensor& probs_tensor) {
  const Argument o1 = ReadTensor("o1", o1_tensor);
  const Argument do2_s = ReadTensor("do2_s", do2_s_tensor);
  const Argument probs = ReadTensor("unzipped_probs", probs_tensor);
  CheckDtype(o1, {paddle::DataType::BFLOAT16});
  CheckDtype(do2_s, {paddle::DataType::BFLOAT16});
  CheckDtype(probs, {paddle::DataType::FLOAT32});
  CheckShapes(o1.shape, do2_s.shape, probs.shape);
  const phi::Place place = CheckPlaces({&o1, &do2_s, &probs}, phi::CPUPlace());

  const Outputs outputs = {AllocateOutput(o1.shape, o1.dtype, place), AllocateOutput(probs.shape, probs.dtype, place),
                           AllocateOutput(do2_s.shape, do2_s.dtype, place)};
  if (do2_s.shape.numel() == 0) {
    FillNewTensor(outputs.probs_grad, 0);  // sums of no terms, where there are rows
    return outputs;
  }
  const Argument do1 = ReadTensor("do1", outputs.do1);
  const Argument probs_grad = ReadTensor("probs_grad", outputs.probs_grad);
  const Argument o2_s = ReadTensor("o2_s", outputs.o2_s);

  SwigluWeightedBwdParams params = {};
  const int leading = o1.shape.rank - 1;
  const int64_t columns = do2_s.shape.last();
  params.intermediate_size = columns;
  params.space = MergeLeadingDims<6>(
      leading, o1.shape.at,
      {o1.strides.at, do2_s.strides.at, probs.strides.at, do1.strides.at, o2_s.strides.at, probs_grad.strides.at},
      {params.gate.row_strides, params.output_grad.row_strides, params.probs.row_strides, params.gate_grad.row_strides,
       params.output.row_strides, params.probs_grad.row_strides});
  // One tensor's left and right halves.
  const auto set_halves = [&](const Argument& argument, auto& left, auto& right) {
    left.data = argument.Data<Bf16>();
    left.column_stride = argument.strides.last();
    right = left;
    right.data += columns * right.column_stride;
  };
  set_halves(o1, params.gate, params.up);
  set_halves(do1, params.gate_grad, params.up_grad);
  params.output_grad.data = do2_s.Data<Bf16>();
  params.output_grad.column_stride = do2_s.strides.last();
  params.output.data = o2_s.Data<Bf16>();
  params.output.column_stride = o2_s.strides.last();
  params.probs.data = probs.Data<float>();
  params.probs_grad.data = probs_grad.Data<float>();

#ifdef PADDLE_GATED_OPS_WITH_CUDA
  if (place.GetType() == phi::AllocationType::GPU) {
    CheckCuda(kFunction, LaunchSwigluWeightedBwdCuda(params, place.GetDeviceId(), CurrentStream(o1_tensor)));
    return outputs;
  }
#endif
  LaunchSwigluWeightedBwdCpu(params);
  return outputs;
}

// ---- The registered op, for graphs

std::vector<paddle::Tensor> Kernel(const paddle::Tensor& o1, const paddle::Tensor& do2_s, const paddle::Tensor& probs) {
  return WithPaddleErrors(kFunction, [&]() -> std::vector<paddle::Tensor> {
    const Outputs outputs = Backward(o1, do2_s, probs);
    return {outputs.do1, outputs.probs_grad, outputs.o2_s};
  });
}

std::vector<Shape> InferShape(const Shape& o1, const Shape& do2_s, const Shape& probs) {
  WithPaddleErrors(kFunction, [&] { CheckShapes(o1, do2_s, probs); });
  return {o1, probs, do2_s};
}

std::vector<paddle::DataType> InferDtype(const paddle::DataType& o1, const paddle::DataType& do2_s,
                                         const paddle::DataType& probs) {
  return {o1, probs, do2_s};
}

std::vector<paddle::Tensor> NoGradient(const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&,
                                       const paddle::Tensor&, const paddle::Tensor&, const paddle::Tensor&) {
  ThrowNoGradient(kFunction);
}

}  // namespace

void CheckSwigluWeightedShapes(const Shape& o1, const Shape& do2_s, const Shape& unzipped_probs) {
  WithPythonErrors(kFunction, [&] { CheckShapes(o1, do2_s, unzipped_probs); });
}

// ---- The eager entry

py::object FusedSwigluWeightedBwd(py::handle o1, py::handle do2_s, py::handle unzipped_probs) {
  return WithPythonErrors(kFunction, [&]() -> py::object {
    const paddle::Tensor& o1_tensor = CheckTensor("o1", o1);
    const paddle::Tensor& do2_s_tensor = CheckTensor("do2_s", do2_s);
    const paddle::Tensor& probs_tensor = CheckTensor("unzipped_probs", unzipped_probs);
    if (o1_tensor.is_dist_tensor() || do2_s_tensor.is_dist_tensor() || probs_tensor.is_dist_tensor()) return py::none();
    const Outputs outputs = WithoutGil([&] { return Backward(o1_tensor, do2_s_tensor, probs_tensor); });
    return py::make_tuple(ToPython(outputs.do1), ToPython(outputs.probs_grad), ToPython(outputs.o2_s));
  });
}

}  // namespace paddle_gated_ops

PD_BUILD_OP(gated_fused_swiglu_weighted_bwd)
    .Inputs({"o1", "do2_s", "unzipped_probs"})
    .Outputs({"do1", "probs_grad", "o2_s"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::Kernel))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::InferShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::InferDtype));

PD_BUILD_GRAD_OP(gated_fused_swiglu_weighted_bwd)
    .Inputs({"o1", "do2_s", "unzipped_probs", paddle::Grad("do1"), paddle::Grad("probs_grad"), paddle::Grad("o2_s")})
    .Outputs({paddle::Grad("o1"), paddle::Grad("do2_s"), paddle::Grad("unzipped_probs")})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::NoGradient));
