#include "rmsnorm_silu_gate/rmsnorm_silu_gate_op.h"

#include <cmath>

#include "common/paddle_glue.h"
#include "rmsnorm_silu_gate/rmsnorm_silu_gate.h"

namespace paddle_gated_ops {
namespace {

constexpr char kFunction[] = "cake_rmsnorm_silu_gate_train_backward";
constexpr auto kBf16 = paddle::DataType::BFLOAT16;
constexpr auto kFp32 = paddle::DataType::FLOAT32;

using Shape = std::vector<int64_t>;

// grad_out, x, z [..., 128], weight [128].
void CheckShapes(const Dims& grad_out, const Dims& x, const Dims& z, const Dims& weight) {
  if (x.rank < 1 || (x.last() != kNormSize && x.last() != kUnknown)) {
    ThrowValueError(Text("x must have shape [..., ", kNormSize, "], but has ", ToString(x)));
  }
  CheckShape("grad_out", grad_out, x, "x's");
  CheckShape("z", z, x, "x's");
  CheckShape("weight", weight, {kNormSize}, "one weight a column of x");
}

void CheckShapes(const Shape& grad_out, const Shape& x, const Shape& z, const Shape& weight) {
  CheckShapes(MakeDims("grad_out", grad_out), MakeDims("x", x), MakeDims("z", z), MakeDims("weight", weight));
}

struct Inputs {
  Argument grad_out, x, z, weight;
};

Inputs ReadInputs(const paddle::Tensor& grad_out, const paddle::Tensor& x, const paddle::Tensor& z,
                  const paddle::Tensor& weight) {
  const Inputs in = {ReadTensor("grad_out", grad_out), ReadTensor("x", x), ReadTensor("z", z),
                     ReadTensor("weight", weight)};
  for (const Argument* argument : {&in.grad_out, &in.x, &in.z, &in.weight}) CheckDtype(*argument, {kBf16});
  CheckShapes(in.grad_out.shape, in.x.shape, in.z.shape, in.weight.shape);
  return in;
}

// What a call writes. Tensors that the caller did not pass are allocated once all checks have passed.
struct Outputs {
  paddle::Tensor grad_x, grad_z, grad_weight, workspace;
  bool compute_grad_weight = true;
  bool accumulate_grad_weight = false;
};

int64_t Rows(const Dims& x) { return x.numel() / kNormSize; }

// Allocates what is missing of the outputs and computes.
void Backward(const Inputs& in, double eps, const phi::Place& place, Outputs* out) {
  const int64_t rows = Rows(in.x.shape);
  if (!out->grad_x.defined()) out->grad_x = AllocateOutput(in.x.shape, kBf16, place);
  if (!out->grad_z.defined()) out->grad_z = AllocateOutput(in.x.shape, kBf16, place);
  if (out->compute_grad_weight && !out->grad_weight.defined()) {
    out->grad_weight = AllocateOutput({kNormSize}, kBf16, place);
  }
  const Argument grad_weight = out->compute_grad_weight ? ReadTensor("grad_weight", out->grad_weight) : Argument{};
  if (rows == 0) {
    if (out->compute_grad_weight && !out->accumulate_grad_weight) FillZeros(grad_weight);
    return;
  }
  const Argument grad_x = ReadTensor("grad_x", out->grad_x);
  const Argument grad_z = ReadTensor("grad_z", out->grad_z);

  RmsNormSiluGateBwdParams params = {};
  params.eps = float(eps);
  params.space = MergeLeadingDims<5>(
      in.x.shape.rank - 1, in.x.shape.at,
      {in.grad_out.strides.at, in.x.strides.at, in.z.strides.at, grad_x.strides.at, grad_z.strides.at},
      {params.output_grad.row_strides, params.x.row_strides, params.gate.row_strides, params.x_grad.row_strides,
       params.gate_grad.row_strides});
  const auto set_view = [](const Argument& argument, auto& view) {
    view.data = argument.Data<Bf16>();
    view.column_stride = argument.strides.last();
  };
  set_view(in.grad_out, params.output_grad);
  set_view(in.x, params.x);
  set_view(in.z, params.gate);
  set_view(grad_x, params.x_grad);
  set_view(grad_z, params.gate_grad);
  params.weight = in.weight.Data<Bf16>();
  params.weight_stride = in.weight.strides.last();

  if (out->compute_grad_weight) {
    if (grad_weight.dtype == kBf16) {
      params.weight_grad_bf16 = grad_weight.Data<Bf16>();
    } else {
      params.weight_grad_fp32 = grad_weight.Data<float>();
    }
    params.weight_grad_stride = grad_weight.strides.last();
    params.accumulate_weight_grad = out->accumulate_grad_weight;
    if (!out->workspace.defined()) {
      out->workspace = AllocateOutput({WorkspaceBytes(rows) / int64_t(sizeof(float))}, kFp32, place);
    }
    const auto begin = reinterpret_cast<uintptr_t>(ReadTensor("workspace", out->workspace).data);
    params.chunk_sums = reinterpret_cast<double*>((begin + 7) / 8 * 8);
  }

#ifdef PADDLE_GATED_OPS_WITH_CUDA
  if (place.GetType() == phi::AllocationType::GPU) {
    CheckCuda(kFunction, LaunchRmsNormSiluGateBwdCuda(params, place.GetDeviceId(), CurrentStream(*in.x.tensor)));
    return;
  }
#endif
  LaunchRmsNormSiluGateBwdCpu(params);
}

double CheckEpsValue(double eps) {
  const float rounded = float(eps);  // -1e-60 becomes -0, 1e60 becomes Inf
  if (!(eps >= 0) || std::isinf(rounded)) ThrowValueError(Text("eps must be finite and not negative, but is ", eps));
  return rounded;
}

double CheckEps(py::handle object) {
  PyObject* eps = object.ptr();
  if (PyBool_Check(eps) || paddle::pybind::PyCheckTensor(eps) || !PyNumber_Check(eps)) {
    ThrowTypeError(Text("eps must be a float, but is ", TypeName(object)));
  }
  const double value = PyFloat_AsDouble(eps);
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    ThrowTypeError(Text("eps must be a float, but is ", TypeName(object)));
  }
  return CheckEpsValue(value);
}

// ---- The registered ops, for graphs: one with and one without the weight's gradient

std::vector<paddle::Tensor> AnyKernel(const paddle::Tensor& grad_out, const paddle::Tensor& x, const paddle::Tensor& z,
                                      const paddle::Tensor& weight, float eps, bool compute_grad_weight) {
  return WithPaddleErrors(kFunction, [&]() -> std::vector<paddle::Tensor> {
    const Inputs in = ReadInputs(grad_out, x, z, weight);
    const phi::Place place = CheckPlaces({&in.grad_out, &in.x, &in.z, &in.weight}, phi::CPUPlace());
    Outputs out;
    out.compute_grad_weight = compute_grad_weight;
    Backward(in, CheckEpsValue(eps), place, &out);
    if (!compute_grad_weight) return {out.grad_x, out.grad_z};
    return {out.grad_x, out.grad_z, out.grad_weight};
  });
}

std::vector<paddle::Tensor> Kernel(const paddle::Tensor& grad_out, const paddle::Tensor& x, const paddle::Tensor& z,
                                   const paddle::Tensor& weight, float eps) {
  return AnyKernel(grad_out, x, z, weight, eps, true);
}

std::vector<paddle::Tensor> KernelWithoutWeight(const paddle::Tensor& grad_out, const paddle::Tensor& x,
                                                const paddle::Tensor& z, const paddle::Tensor& weight, float eps) {
  return AnyKernel(grad_out, x, z, weight, eps, false);
}

std::vector<Shape> InferShape(const Shape& grad_out, const Shape& x, const Shape& z, const Shape& weight) {
  WithPaddleErrors(kFunction, [&] { CheckShapes(grad_out, x, z, weight); });
  return {x, z, weight};
}

std::vector<Shape> InferShapeWithoutWeight(const Shape& grad_out, const Shape& x, const Shape& z, const Shape& weight) {
  std::vector<Shape> shapes = InferShape(grad_out, x, z, weight);
  shapes.pop_back();
  return shapes;
}

using Dtype = paddle::DataType;

std::vector<Dtype> InferDtype(const Dtype&, const Dtype& x, const Dtype& z, const Dtype& weight) {
  return {x, z, weight};
}

std::vector<Dtype> InferDtypeWithoutWeight(const Dtype&, const Dtype& x, const Dtype& z, const Dtype&) { return {x, z}; }

using paddle::Tensor;

std::vector<Tensor> NoGradient(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, float) {
  ThrowNoGradient(kFunction);
}

std::vector<Tensor> NoGradientWithoutWeight(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                            const Tensor&, float) {
  ThrowNoGradient(kFunction);
}

// ---- The caller's outputs, of the eager entry alone

// An output or workspace that the caller may pass.
struct OptionalArgument {
  py::handle object;
  bool given;
  Argument argument;
};

OptionalArgument ReadOptional(const char* name, py::handle object) {
  OptionalArgument optional = {object, !object.is_none(), {}};
  if (optional.given) optional.argument = ReadTensor(name, CheckTensor(name, object));
  return optional;
}

void CheckNoOverlap(const Argument& output, const Argument& other) {
  if (MayOverlap(output.Memory(), other.Memory())) {
    ThrowValueError(Text(output.name, " must not share memory with ", other.name));
  }
}

// A gradient of [..., 128] may be an input's memory, element for element: each row is read before it is written.
void CheckNoOverlapUnlessSame(const Argument& output, const Argument& input) {
  if (!IsSameMemory(output.Memory(), input.Memory()) && MayOverlap(output.Memory(), input.Memory())) {
    ThrowValueError(Text(output.name, " must be exactly the memory of ", input.name,
                         " (same pointer and strides) or share none with it"));
  }
}

struct OptionalArguments {
  OptionalArgument grad_x, grad_z, grad_weight, workspace;
};

void CheckOptionalArguments(const Inputs& in, const OptionalArguments& optional) {
  for (const OptionalArgument* output : {&optional.grad_x, &optional.grad_z}) {
    if (!output->given) continue;
    CheckDtype(output->argument, {kBf16});
    CheckShape(output->argument.name, output->argument.shape, in.x.shape, "x's");
  }
  if (optional.grad_weight.given) {
    CheckDtype(optional.grad_weight.argument, {kBf16, kFp32});
    CheckShape("grad_weight", optional.grad_weight.argument.shape, {kNormSize}, "weight's");
  }
  if (optional.workspace.given) {
    const Argument& workspace = optional.workspace.argument;
    CheckDtype(workspace, {kFp32});
    int64_t stride = 1;
    for (int d = workspace.shape.rank - 1; d >= 0; --d) {
      if (workspace.shape.at[d] != 1 && workspace.strides.at[d] != stride) {
        ThrowValueError(Text("workspace must be contiguous, but has shape ", ToString(workspace.shape), " and strides ",
                             ToString(workspace.strides)));
      }
      stride *= workspace.shape.at[d];
    }
    const int64_t rows = Rows(in.x.shape), bytes = workspace.shape.numel() * int64_t(sizeof(float));
    if (bytes < WorkspaceBytes(rows)) {
      ThrowValueError(Text("workspace must have at least ", WorkspaceBytes(rows), " bytes for ", rows, " rows, but has ",
                           bytes));
    }
  }
}

// Who may share memory with whom.
void CheckMemory(const Inputs& in, const OptionalArguments& optional) {
  const OptionalArgument* const outputs[] = {&optional.grad_x, &optional.grad_z, &optional.grad_weight};
  for (const OptionalArgument* output : outputs) {
    if (!output->given) continue;
    if (MayOverlapItself(output->argument.Memory())) {
      ThrowValueError(Text(output->argument.name, " must have a place of its own for each element, but has shape ",
                           ToString(output->argument.shape), " and strides ", ToString(output->argument.strides)));
    }
    CheckNotTrainableLeaf(output->argument.name, output->object);
  }
  for (const OptionalArgument* output : {&optional.grad_x, &optional.grad_z}) {
    if (!output->given) continue;
    for (const Argument* input : {&in.grad_out, &in.x, &in.z}) CheckNoOverlapUnlessSame(output->argument, *input);
    CheckNoOverlap(output->argument, in.weight);
  }
  if (optional.grad_x.given && optional.grad_z.given) {
    CheckNoOverlap(optional.grad_x.argument, optional.grad_z.argument);
  }
  for (const OptionalArgument* alone : {&optional.grad_weight, &optional.workspace}) {
    if (!alone->given) continue;
    for (const Argument* input : {&in.grad_out, &in.x, &in.z, &in.weight}) CheckNoOverlap(alone->argument, *input);
    for (const OptionalArgument* output : outputs) {
      if (output->given && output != alone) CheckNoOverlap(alone->argument, output->argument);
    }
  }
}

}  // namespace

// ---- The eager entry

double CheckedEps(py::handle eps) {
  return WithPythonErrors(kFunction, [&] { return CheckEps(eps); });
}

void CheckRmsNormSiluGateShapes(const Shape& grad_out, const Shape& x, const Shape& z, const Shape& weight) {
  WithPythonErrors(kFunction, [&] { CheckShapes(grad_out, x, z, weight); });
}

int64_t RmsNormSiluGateWorkspaceBytes(int64_t rows) { return WorkspaceBytes(rows); }

py::object CakeRmsNormSiluGateTrainBackward(py::handle grad_out, py::handle x, py::handle z, py::handle weight,
                                            py::handle eps, py::handle grad_x, py::handle grad_z, py::handle grad_weight,
                                            py::handle accumulate_grad_weight, py::handle compute_grad_weight,
                                            py::handle workspace) {
  return WithPythonErrors(kFunction, [&]() -> py::object {
    const paddle::Tensor& grad_out_tensor = CheckTensor("grad_out", grad_out);
    const paddle::Tensor& x_tensor = CheckTensor("x", x);
    const paddle::Tensor& z_tensor = CheckTensor("z", z);
    const paddle::Tensor& weight_tensor = CheckTensor("weight", weight);
    for (const paddle::Tensor* tensor : {&grad_out_tensor, &x_tensor, &z_tensor, &weight_tensor}) {
      if (tensor->is_dist_tensor()) return py::none();
    }
    Outputs out;
    out.accumulate_grad_weight = CheckBool("accumulate_grad_weight", accumulate_grad_weight);
    out.compute_grad_weight = CheckBool("compute_grad_weight", compute_grad_weight);
    const double eps_value = CheckEps(eps);
    if (out.accumulate_grad_weight && grad_weight.is_none()) {
      ThrowValueError("accumulate_grad_weight=True needs grad_weight, the tensor to add to, but it is None");
    }
    if (out.accumulate_grad_weight && !out.compute_grad_weight) {
      ThrowValueError("accumulate_grad_weight=True needs compute_grad_weight=True, but it is False");
    }

    const Inputs in = ReadInputs(grad_out_tensor, x_tensor, z_tensor, weight_tensor);
    const OptionalArguments optional = {ReadOptional("grad_x", grad_x), ReadOptional("grad_z", grad_z),
                                        ReadOptional("grad_weight", grad_weight), ReadOptional("workspace", workspace)};
    CheckOptionalArguments(in, optional);
    const phi::Place place =
        CheckPlaces({&in.grad_out, &in.x, &in.z, &in.weight, &optional.grad_x.argument, &optional.grad_z.argument,
                     &optional.grad_weight.argument, &optional.workspace.argument},
                    phi::CPUPlace());
    CheckMemory(in, optional);

    const auto take = [](const OptionalArgument& from, paddle::Tensor* to) {
      if (from.given) *to = *from.argument.tensor;
    };
    take(optional.grad_x, &out.grad_x);
    take(optional.grad_z, &out.grad_z);
    if (out.compute_grad_weight) {
      take(optional.grad_weight, &out.grad_weight);
      take(optional.workspace, &out.workspace);
    }
    WithoutGil([&] { Backward(in, eps_value, place, &out); });

    const auto result = [](const OptionalArgument& given, paddle::Tensor* tensor) -> py::object {
      if (!given.given) return ToPython(*tensor);
      tensor->bump_inplace_version();
      return py::reinterpret_borrow<py::object>(given.object);
    };
    return py::make_tuple(
        result(optional.grad_x, &out.grad_x), result(optional.grad_z, &out.grad_z),
        out.compute_grad_weight ? result(optional.grad_weight, &out.grad_weight) : py::object(py::none()));
  });
}

}  // namespace paddle_gated_ops

PD_BUILD_OP(gated_cake_rmsnorm_silu_gate_train_backward)
    .Inputs({"grad_out", "x", "z", "weight"})
    .Outputs({"grad_x", "grad_z", "grad_weight"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::Kernel))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::InferShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::InferDtype));

PD_BUILD_GRAD_OP(gated_cake_rmsnorm_silu_gate_train_backward)
    .Inputs({"grad_out", "x", "z", "weight", paddle::Grad("grad_x"), paddle::Grad("grad_z"), paddle::Grad("grad_weight")})
    .Outputs({paddle::Grad("grad_out"), paddle::Grad("x"), paddle::Grad("z"), paddle::Grad("weight")})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::NoGradient));

PD_BUILD_OP(gated_cake_rmsnorm_silu_gate_train_backward_without_weight)
    .Inputs({"grad_out", "x", "z", "weight"})
    .Outputs({"grad_x", "grad_z"})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::KernelWithoutWeight))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::InferShapeWithoutWeight))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::InferDtypeWithoutWeight));

PD_BUILD_GRAD_OP(gated_cake_rmsnorm_silu_gate_train_backward_without_weight)
    .Inputs({"grad_out", "x", "z", "weight", paddle::Grad("grad_x"), paddle::Grad("grad_z")})
    .Outputs({paddle::Grad("grad_out"), paddle::Grad("x"), paddle::Grad("z"), paddle::Grad("weight")})
    .Attrs({"eps: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::NoGradientWithoutWeight));
