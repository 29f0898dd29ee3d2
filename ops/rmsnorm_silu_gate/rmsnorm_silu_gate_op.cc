#include "rmsnorm_silu_gate/rmsnorm_silu_gate_op.h"

#include <cmath>

#include "common/paddle_glue.h"
#include "common/paddle_glue_outputs.h"
#include "common/paddle_glue_spmd.h"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate.h"

namespace paddle_gated_ops {
namespace {

constexpr char kFwd[] = "cake_rmsnorm_silu_gate";
constexpr char kBwd[] = "cake_rmsnorm_silu_gate_train_backward";
constexpr auto kBf16 = paddle::DataType::BFLOAT16;
constexpr auto kFp32 = paddle::DataType::FLOAT32;

using Shape = std::vector<int64_t>;
using paddle::Tensor;

// ---- Checks

// x, z [..., 128], weight [128].
void CheckShapes(const Dims& x, const Dims& z, const Dims& weight) {
  if (x.rank < 1 || (x.last() != kNormSize && x.last() != kUnknown)) {
    ThrowValueError(Text("x must have shape [..., ", kNormSize, "], but has ", ToString(x)));
  }
  CheckShape("z", z, x, "x's");
  CheckShape("weight", weight, {kNormSize}, "one weight a column of x");
}

// ... and grad_out [..., 128]
void CheckShapes(const Dims& grad_out, const Dims& x, const Dims& z, const Dims& weight) {
  CheckShapes(x, z, weight);
  CheckShape("grad_out", grad_out, x, "x's");
}

void CheckFwdShapes(const Shape& x, const Shape& z, const Shape& weight) {
  CheckShapes(MakeDims("x", x), MakeDims("z", z), MakeDims("weight", weight));
}

void CheckBwdShapes(const Shape& grad_out, const Shape& x, const Shape& z, const Shape& weight) {
  CheckShapes(MakeDims("grad_out", grad_out), MakeDims("x", x), MakeDims("z", z), MakeDims("weight", weight));
}

double CheckEpsValue(double eps) {
  const float rounded = float(eps);  // -1e-60 becomes -0, 1e60 becomes Inf
  if (!(eps >= 0) || std::isinf(rounded)) ThrowValueError(Text("eps must be finite and not negative, but is ", eps));
  return rounded;
}

double CheckEps(py::handle eps) { return CheckEpsValue(CheckNumber("eps", eps)); }

int64_t Rows(const Dims& x) { return x.numel() / kNormSize; }

// ---- The calls

struct FwdInputs {
  Argument x, z, weight;
};

FwdInputs ReadInputs(const Tensor& x, const Tensor& z, const Tensor& weight, paddle::DataType weight_dtype = kBf16) {
  const FwdInputs in = {ReadTensor("x", x), ReadTensor("z", z), ReadTensor("weight", weight)};
  for (const Argument* argument : {&in.x, &in.z}) CheckDtype(*argument, {kBf16});
  CheckDtype(in.weight, {weight_dtype});
  CheckShapes(in.x.shape, in.z.shape, in.weight.shape);
  return in;
}

void Forward(const char* function, const FwdInputs& in, double eps, const phi::Place& place, Tensor* out) {
  const bool fresh = !out->defined();
  if (fresh) *out = AllocateOutput(in.x.shape, kBf16, place);
  if (in.x.shape.numel() == 0) return;
  const Argument output = ReadTensor("out", *out);

  RmsNormSiluGateFwdParams params = {};
  params.eps = float(eps);
  params.fresh_outputs = fresh;
  params.space = MergeLeadingDims(in.x.shape.rank - 1, in.x.shape.at, {in.x.strides.at, in.z.strides.at, output.strides.at},
                                  params.x, params.gate, params.output);
  SetView(in.x, &params.x);
  SetView(in.z, &params.gate);
  SetView(output, &params.output);
  params.weight = in.weight.Data<Bf16>();
  params.weight_stride = in.weight.strides.last();
  Launch<LaunchRmsNormSiluGateFwdCpu, LaunchRmsNormSiluGateFwdCuda>(function, params, place, *in.x.tensor);
}

struct BwdInputs {
  Argument grad_out, x, z, weight;
};

BwdInputs ReadInputs(const Tensor& grad_out, const Tensor& x, const Tensor& z, const Tensor& weight) {
  const BwdInputs in = {ReadTensor("grad_out", grad_out), ReadTensor("x", x), ReadTensor("z", z),
                        ReadTensor("weight", weight)};
  for (const Argument* argument : {&in.grad_out, &in.x, &in.z, &in.weight}) CheckDtype(*argument, {kBf16});
  CheckShapes(in.grad_out.shape, in.x.shape, in.z.shape, in.weight.shape);
  return in;
}

// What a call writes. Wanted tensors that the caller did not pass are allocated once all checks have passed.
struct Outputs {
  Tensor grad_x, grad_z, grad_weight, workspace;
  bool want_grad_x = true, want_grad_z = true, want_grad_weight = true;
  bool accumulate_grad_weight = false;
};

void Backward(const char* function, const BwdInputs& in, double eps, const phi::Place& place, Outputs* out) {
  const auto allocate = [&](bool wanted, const Argument& like, Tensor* tensor) {
    const bool fresh = wanted && !tensor->defined();
    if (fresh) *tensor = AllocateOutput(like.shape, kBf16, place);
    return fresh;
  };
  const bool fresh_grad_x = allocate(out->want_grad_x, in.x, &out->grad_x);
  const bool fresh_grad_z = allocate(out->want_grad_z, in.x, &out->grad_z);
  allocate(out->want_grad_weight, in.weight, &out->grad_weight);
  const Argument grad_x = ReadOutput("grad_x", out->want_grad_x, out->grad_x);
  const Argument grad_z = ReadOutput("grad_z", out->want_grad_z, out->grad_z);
  const Argument grad_weight = ReadOutput("grad_weight", out->want_grad_weight, out->grad_weight);
  const int64_t rows = Rows(in.x.shape);
  if (rows == 0) {
    if (out->want_grad_weight && !out->accumulate_grad_weight) FillZeros(grad_weight);
    return;
  }

  RmsNormSiluGateBwdParams params = {};
  params.eps = float(eps);
  params.fresh_outputs = fresh_grad_x || fresh_grad_z;
  params.space =
      MergeLeadingDims(in.x.shape.rank - 1, in.x.shape.at,
                       {in.grad_out.strides.at, in.x.strides.at, in.z.strides.at, grad_x.strides.at, grad_z.strides.at},
                       params.output_grad, params.x, params.gate, params.x_grad, params.gate_grad);
  SetView(in.grad_out, &params.output_grad);
  SetView(in.x, &params.x);
  SetView(in.z, &params.gate);
  if (out->want_grad_x) SetView(grad_x, &params.x_grad);
  if (out->want_grad_z) SetView(grad_z, &params.gate_grad);
  params.weight = in.weight.Data<Bf16>();
  params.weight_stride = in.weight.strides.last();

  std::shared_ptr<phi::Allocation> scratch;
  if (out->want_grad_weight) {
    if (grad_weight.dtype == kBf16) {
      params.weight_grad_bf16 = grad_weight.Data<Bf16>();
    } else {
      params.weight_grad_fp32 = grad_weight.Data<float>();
    }
    params.weight_grad_stride = grad_weight.strides.last();
    params.accumulate_weight_grad = out->accumulate_grad_weight;
    if (!out->workspace.defined()) scratch = AllocateScratch(WorkspaceBytes(rows), place, *in.x.tensor);
    void* workspace = scratch ? scratch->ptr() : ReadTensor("workspace", out->workspace).data;
    params.chunk_sums = reinterpret_cast<double*>((reinterpret_cast<uintptr_t>(workspace) + 7) / 8 * 8);
  }
  Launch<LaunchRmsNormSiluGateBwdCpu, LaunchRmsNormSiluGateBwdCuda>(function, params, place, *in.x.tensor);
}

phi::Place PlaceOf(const BwdInputs& in) { return CheckPlaces({&in.grad_out, &in.x, &in.z, &in.weight}); }

// ---- The registered ops, for graphs and DistTensors. Their weight may be FP32 too: it is rounded here, and its gradient,
// of its dtype as Paddle has it, is the FP32 sum, which processes that have a part each can add up before it is rounded.

// As Paddle's cast rounds, which is what eager calls use.
Tensor InBf16(const Tensor& weight) {
  const bool fp32 = weight.initialized() && weight.dtype() == kFp32;
  return fp32 ? paddle::experimental::cast(weight, kBf16) : weight;
}

std::vector<Tensor> AnyBwdKernel(const char* function, const Tensor& grad_out, const Tensor& x, const Tensor& z,
                                 const Tensor& weight, float eps, bool want_grad_weight) {
  return WithPaddleErrors(function, [&]() -> std::vector<Tensor> {
    const Tensor weight_bf16 = InBf16(weight);
    const BwdInputs in = ReadInputs(grad_out, x, z, weight_bf16);
    Outputs out;
    out.want_grad_weight = want_grad_weight;
    const phi::Place place = PlaceOf(in);
    if (want_grad_weight) out.grad_weight = AllocateOutput(in.weight.shape, weight.dtype(), place);
    Backward(function, in, CheckEpsValue(eps), place, &out);
    if (!want_grad_weight) return {out.grad_x, out.grad_z};
    return {out.grad_x, out.grad_z, out.grad_weight};
  });
}

std::vector<Tensor> BwdKernel(const Tensor& grad_out, const Tensor& x, const Tensor& z, const Tensor& weight, float eps) {
  return AnyBwdKernel(kBwd, grad_out, x, z, weight, eps, true);
}

std::vector<Tensor> BwdKernelWithoutWeight(const Tensor& grad_out, const Tensor& x, const Tensor& z, const Tensor& weight,
                                           float eps) {
  return AnyBwdKernel(kBwd, grad_out, x, z, weight, eps, false);
}

std::vector<Shape> BwdInferShape(const Shape& grad_out, const Shape& x, const Shape& z, const Shape& weight) {
  WithPaddleErrors(kBwd, [&] { CheckBwdShapes(grad_out, x, z, weight); });
  return {x, z, weight};
}

std::vector<Shape> BwdInferShapeWithoutWeight(const Shape& grad_out, const Shape& x, const Shape& z, const Shape& weight) {
  std::vector<Shape> shapes = BwdInferShape(grad_out, x, z, weight);
  shapes.pop_back();
  return shapes;
}

using Dtype = paddle::DataType;

std::vector<Dtype> BwdInferDtype(const Dtype&, const Dtype& x, const Dtype& z, const Dtype& weight) {
  return {x, z, weight};
}

std::vector<Dtype> BwdInferDtypeWithoutWeight(const Dtype&, const Dtype& x, const Dtype& z, const Dtype&) { return {x, z}; }

std::vector<Tensor> NoGradient(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, float) {
  ThrowNoGradient(kBwd);
}

std::vector<Tensor> NoGradientWithoutWeight(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor&, float) {
  ThrowNoGradient(kBwd);
}

std::vector<Tensor> FwdKernel(const Tensor& x, const Tensor& z, const Tensor& weight, float eps) {
  return WithPaddleErrors(kFwd, [&]() -> std::vector<Tensor> {
    const Tensor weight_bf16 = InBf16(weight);
    const FwdInputs in = ReadInputs(x, z, weight_bf16);
    Tensor out;
    Forward(kFwd, in, CheckEpsValue(eps), CheckPlaces({&in.x, &in.z, &in.weight}), &out);
    return {out};
  });
}

std::vector<Shape> FwdInferShape(const Shape& x, const Shape& z, const Shape& weight) {
  WithPaddleErrors(kFwd, [&] { CheckFwdShapes(x, z, weight); });
  return {x};
}

std::vector<Dtype> FwdInferDtype(const Dtype& x, const Dtype&, const Dtype&) { return {x}; }

std::vector<Tensor> FwdGradKernel(const Tensor& x, const Tensor& z, const Tensor& weight, const Tensor& grad_out,
                                  float eps) {
  return AnyBwdKernel(kFwd, grad_out, x, z, weight, eps, true);
}

std::vector<Shape> FwdGradInferShape(const Shape& x, const Shape& z, const Shape& weight, const Shape&) {
  return {x, z, weight};
}

std::vector<Dtype> FwdGradInferDtype(const Dtype& x, const Dtype& z, const Dtype& weight, const Dtype&) {
  return {x, z, weight};
}

#ifdef PD_INFER_SPMD_RULE
SpmdInfo BwdSpmd(const DistMetaTensor& grad_out, const DistMetaTensor& x, const DistMetaTensor& z,
                 const DistMetaTensor& weight, float) {
  const RowSharding split(x.dims().size() - 1, {&x, &z, &grad_out});
  return {{split.Rows(grad_out), split.Rows(x), split.Rows(z), split.Replicated(weight)},
          {split.Rows(x), split.Rows(z), split.SumOverRows(weight)}};
}

SpmdInfo BwdSpmdWithoutWeight(const DistMetaTensor& grad_out, const DistMetaTensor& x, const DistMetaTensor& z,
                              const DistMetaTensor& weight, float eps) {
  SpmdInfo info = BwdSpmd(grad_out, x, z, weight, eps);
  info.second.pop_back();
  return info;
}

SpmdInfo FwdSpmd(const DistMetaTensor& x, const DistMetaTensor& z, const DistMetaTensor& weight, float) {
  const RowSharding split(x.dims().size() - 1, {&x, &z});
  return {{split.Rows(x), split.Rows(z), split.Replicated(weight)}, {split.Rows(x)}};
}

SpmdInfo FwdGradSpmd(const DistMetaTensor& x, const DistMetaTensor& z, const DistMetaTensor& weight,
                     const DistMetaTensor& grad_out, float eps) {
  SpmdInfo info = BwdSpmd(grad_out, x, z, weight, eps);
  std::rotate(info.first.begin(), info.first.begin() + 1, info.first.end());  // grad_out comes last here
  return info;
}
#endif

// ---- Checks of what the caller passes to the eager entry

void CheckWorkspace(const OptionalArgument& optional, int64_t rows) {
  if (!optional.given) return;
  const Argument& workspace = optional.argument;
  CheckDtype(workspace, {kFp32});
  if (!IsContiguous(workspace)) {
    ThrowValueError(Text("workspace must be contiguous, but has shape ", ToString(workspace.shape), " and strides ",
                         ToString(workspace.strides)));
  }
  const int64_t bytes = workspace.shape.numel() * int64_t(sizeof(float));
  if (bytes < WorkspaceBytes(rows)) {
    ThrowValueError(
        Text("workspace must have at least ", WorkspaceBytes(rows), " bytes for ", rows, " rows, but has ", bytes));
  }
}

struct OptionalArguments {
  OptionalArgument grad_x, grad_z, grad_weight, workspace;
};

// Who may share memory with whom.
void CheckMemory(const BwdInputs& in, const OptionalArguments& optional) {
  for (const OptionalArgument* output : {&optional.grad_x, &optional.grad_z, &optional.grad_weight}) {
    CheckWritable(*output);
  }
  for (const OptionalArgument* output : {&optional.grad_x, &optional.grad_z}) {
    for (const Argument* input : {&in.grad_out, &in.x, &in.z}) CheckNoOverlapUnlessSame(*output, *input);
    CheckNoOverlap(*output, in.weight);
  }
  CheckNoOverlap(optional.grad_x, optional.grad_z);
  for (const OptionalArgument* alone : {&optional.grad_weight, &optional.workspace}) {
    for (const Argument* input : {&in.grad_out, &in.x, &in.z, &in.weight}) CheckNoOverlap(*alone, *input);
    CheckNoOverlap(*alone, optional.grad_x);
    CheckNoOverlap(*alone, optional.grad_z);
  }
  CheckNoOverlap(optional.workspace, optional.grad_weight);
}

}  // namespace

void CheckRmsNormSiluGateFwdShapes(const Shape& x, const Shape& z, const Shape& weight) {
  WithPythonErrors(kFwd, [&] { CheckFwdShapes(x, z, weight); });
}

void CheckRmsNormSiluGateBwdShapes(const Shape& grad_out, const Shape& x, const Shape& z, const Shape& weight) {
  WithPythonErrors(kBwd, [&] { CheckBwdShapes(grad_out, x, z, weight); });
}

double CheckedEps(const std::string& function, py::handle eps) {
  return WithPythonErrors(function.c_str(), [&] { return CheckEps(eps); });
}

int64_t RmsNormSiluGateWorkspaceBytes(int64_t rows) { return WorkspaceBytes(rows); }

// ---- The eager entries

void CheckCakeRmsNormSiluGate(py::handle x, py::handle z, py::handle weight, py::handle eps, bool fp32_weight) {
  WithPythonErrors(kFwd, [&] {
    const Tensor& x_tensor = CheckTensor("x", x);
    const Tensor& z_tensor = CheckTensor("z", z);
    const Tensor& weight_tensor = CheckTensor("weight", weight);
    CheckEps(eps);
    if (AnyDist({{"x", &x_tensor}, {"z", &z_tensor}, {"weight", &weight_tensor}})) return;
    const FwdInputs in = ReadInputs(x_tensor, z_tensor, weight_tensor, fp32_weight ? kFp32 : kBf16);
    CheckPlaces({&in.x, &in.z, &in.weight});
  });
}

py::object CakeRmsNormSiluGate(const std::string& function, py::handle x, py::handle z, py::handle weight, py::handle eps,
                               py::handle out) {
  return WithPythonErrors(function.c_str(), [&]() -> py::object {
    const Tensor& x_tensor = CheckTensor("x", x);
    const Tensor& z_tensor = CheckTensor("z", z);
    const Tensor& weight_tensor = CheckTensor("weight", weight);
    if (AnyDist({{"x", &x_tensor}, {"z", &z_tensor}, {"weight", &weight_tensor}})) return py::none();
    const double eps_value = CheckEps(eps);
    const FwdInputs in = ReadInputs(x_tensor, z_tensor, weight_tensor);
    const OptionalArgument given_out = ReadOptional("out", out);
    CheckDtype(given_out, {kBf16});
    CheckShape(given_out, in.x.shape, "x's");
    const phi::Place place = CheckPlaces({&in.x, &in.z, &in.weight, &given_out.argument});
    CheckWritable(given_out);
    CheckNoOverlapUnlessSame(given_out, in.x);
    CheckNoOverlapUnlessSame(given_out, in.z);
    CheckNoOverlap(given_out, in.weight);
    Tensor output = TensorOf(given_out);
    WithoutGil([&] { Forward(function.c_str(), in, eps_value, place, &output); });
    return ToResult(true, given_out, &output);
  });
}

py::object CakeRmsNormSiluGateTrainBackward(py::handle grad_out, py::handle x, py::handle z, py::handle weight,
                                            py::handle eps, py::handle grad_x, py::handle grad_z, py::handle grad_weight,
                                            py::handle accumulate_grad_weight, py::handle compute_grad_weight,
                                            py::handle workspace, bool want_grad_x, bool want_grad_z) {
  return WithPythonErrors(kBwd, [&]() -> py::object {
    const Tensor& grad_out_tensor = CheckTensor("grad_out", grad_out);
    const Tensor& x_tensor = CheckTensor("x", x);
    const Tensor& z_tensor = CheckTensor("z", z);
    const Tensor& weight_tensor = CheckTensor("weight", weight);
    if (AnyDist({{"grad_out", &grad_out_tensor}, {"x", &x_tensor}, {"z", &z_tensor}, {"weight", &weight_tensor}})) {
      return py::none();
    }
    const bool accumulate = CheckBool("accumulate_grad_weight", accumulate_grad_weight);
    const bool want_grad_weight = CheckBool("compute_grad_weight", compute_grad_weight);
    const double eps_value = CheckEps(eps);
    if (accumulate && grad_weight.is_none()) {
      ThrowValueError("accumulate_grad_weight=True needs grad_weight, the tensor to add to, but it is None");
    }
    if (accumulate && !want_grad_weight) {
      ThrowValueError("accumulate_grad_weight=True needs compute_grad_weight=True, but it is False");
    }

    const BwdInputs in = ReadInputs(grad_out_tensor, x_tensor, z_tensor, weight_tensor);
    const OptionalArguments optional = {ReadOptional("grad_x", grad_x), ReadOptional("grad_z", grad_z),
                                        ReadOptional("grad_weight", grad_weight), ReadOptional("workspace", workspace)};
    for (const OptionalArgument* output : {&optional.grad_x, &optional.grad_z}) {
      CheckDtype(*output, {kBf16});
      CheckShape(*output, in.x.shape, "x's");
    }
    CheckDtype(optional.grad_weight, {kBf16, kFp32});
    CheckShape(optional.grad_weight, {kNormSize}, "weight's");
    CheckWorkspace(optional.workspace, Rows(in.x.shape));
    const phi::Place place =
        CheckPlaces({&in.grad_out, &in.x, &in.z, &in.weight, &optional.grad_x.argument, &optional.grad_z.argument,
                     &optional.grad_weight.argument, &optional.workspace.argument});
    CheckMemory(in, optional);

    Outputs out = {TensorOf(optional.grad_x),
                   TensorOf(optional.grad_z),
                   want_grad_weight ? TensorOf(optional.grad_weight) : Tensor(),
                   want_grad_weight ? TensorOf(optional.workspace) : Tensor(),
                   want_grad_x,
                   want_grad_z,
                   want_grad_weight,
                   accumulate};
    WithoutGil([&] { Backward(kBwd, in, eps_value, place, &out); });
    return py::make_tuple(ToResult(want_grad_x, optional.grad_x, &out.grad_x),
                          ToResult(want_grad_z, optional.grad_z, &out.grad_z),
                          ToResult(want_grad_weight, optional.grad_weight, &out.grad_weight));
  });
}

}  // namespace paddle_gated_ops

PD_BUILD_OP(gated_cake_rmsnorm_silu_gate_train_backward)
    .Inputs({"grad_out", "x", "z", "weight"})
    .Outputs({"grad_x", "grad_z", "grad_weight"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::BwdKernel))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::BwdInferShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::BwdInferDtype)) GATED_OPS_SPMD_RULE(paddle_gated_ops::BwdSpmd);

PD_BUILD_GRAD_OP(gated_cake_rmsnorm_silu_gate_train_backward)
    .Inputs({"grad_out", "x", "z", "weight", paddle::Grad("grad_x"), paddle::Grad("grad_z"), paddle::Grad("grad_weight")})
    .Outputs({paddle::Grad("grad_out"), paddle::Grad("x"), paddle::Grad("z"), paddle::Grad("weight")})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::NoGradient));

PD_BUILD_OP(gated_cake_rmsnorm_silu_gate_train_backward_without_weight)
    .Inputs({"grad_out", "x", "z", "weight"})
    .Outputs({"grad_x", "grad_z"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::BwdKernelWithoutWeight))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::BwdInferShapeWithoutWeight))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::BwdInferDtypeWithoutWeight))
        GATED_OPS_SPMD_RULE(paddle_gated_ops::BwdSpmdWithoutWeight);

PD_BUILD_GRAD_OP(gated_cake_rmsnorm_silu_gate_train_backward_without_weight)
    .Inputs({"grad_out", "x", "z", "weight", paddle::Grad("grad_x"), paddle::Grad("grad_z")})
    .Outputs({paddle::Grad("grad_out"), paddle::Grad("x"), paddle::Grad("z"), paddle::Grad("weight")})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::NoGradientWithoutWeight));

PD_BUILD_OP(gated_cake_rmsnorm_silu_gate)
    .Inputs({"x", "z", "weight"})
    .Outputs({"y"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::FwdKernel))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::FwdInferShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::FwdInferDtype)) GATED_OPS_SPMD_RULE(paddle_gated_ops::FwdSpmd);

PD_BUILD_GRAD_OP(gated_cake_rmsnorm_silu_gate)
    .Inputs({"x", "z", "weight", paddle::Grad("y")})
    .Outputs({paddle::Grad("x"), paddle::Grad("z"), paddle::Grad("weight")})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::FwdGradKernel))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::FwdGradInferShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::FwdGradInferDtype)) GATED_OPS_SPMD_RULE(paddle_gated_ops::FwdGradSpmd);
