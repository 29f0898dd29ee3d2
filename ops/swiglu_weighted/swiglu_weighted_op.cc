#include "swiglu_weighted/swiglu_weighted_op.h"

#include <cmath>
#include <limits>

#include "common/paddle_glue.h"
#include "common/paddle_glue_outputs.h"
#include "common/paddle_glue_spmd.h"
#include "swiglu_weighted/swiglu_weighted.h"

namespace paddle_gated_ops {
namespace {

constexpr char kFwd[] = "fused_swiglu_weighted";
constexpr char kBwd[] = "fused_swiglu_weighted_bwd";
constexpr auto kBf16 = paddle::DataType::BFLOAT16;
constexpr auto kFp32 = paddle::DataType::FLOAT32;
constexpr float kNoClamp = std::numeric_limits<float>::infinity();

using Shape = std::vector<int64_t>;
using paddle::Tensor;

// ---- Checks

// o1 [..., 2I], unzipped_probs [...] or [..., 1]. Returns the shape [..., I].
Dims CheckShapes(const Dims& o1, const Dims& probs) {
  if (o1.rank < 1) ThrowValueError("o1 must have shape [..., 2 * intermediate_size], but has []");
  if (o1.last() != kUnknown && o1.last() % 2 != 0) {
    ThrowValueError(Text("o1 must have an even last dimension (gate and up side by side), but has shape ", ToString(o1)));
  }
  Dims rows = o1;
  rows.rank -= 1;
  Dims column = o1;
  column.at[o1.rank - 1] = 1;
  if (!Matches(probs, rows) && !Matches(probs, column)) {
    ThrowValueError(Text("unzipped_probs must have shape ", ToString(rows), " or ", ToString(column),
                         " (one probability a row of o1), but has ", ToString(probs)));
  }
  Dims half = o1;
  half.at[o1.rank - 1] = o1.last() == kUnknown ? kUnknown : o1.last() / 2;
  return half;
}

// ... and do2_s [..., I]
void CheckShapes(const Dims& o1, const Dims& do2_s, const Dims& probs) {
  CheckShape("do2_s", do2_s, CheckShapes(o1, probs), "o1's with half the last dimension");
}

void CheckFwdShapes(const Shape& o1, const Shape& probs) {
  CheckShapes(MakeDims("o1", o1), MakeDims("unzipped_probs", probs));
}

void CheckBwdShapes(const Shape& o1, const Shape& do2_s, const Shape& probs) {
  CheckShapes(MakeDims("o1", o1), MakeDims("do2_s", do2_s), MakeDims("unzipped_probs", probs));
}

float CheckClampNumber(double clamp_value) {
  const float rounded = float(clamp_value);
  if (!(rounded > 0) || std::isinf(rounded)) {
    ThrowValueError(Text("clamp_value must be finite and above 0, but is ", clamp_value));
  }
  return rounded;
}

float CheckClamp(py::handle clamp_value) {
  return clamp_value.is_none() ? kNoClamp : CheckClampNumber(CheckNumber("clamp_value", clamp_value));
}

// The attribute of the registered ops: 0 for no clamp.
float ClampOfAttribute(float attribute) { return attribute == 0 ? kNoClamp : CheckClampNumber(attribute); }

// ---- The calls

// One tensor's left and right halves.
template <typename T>
void SetHalves(const Argument& argument, int64_t columns, RowView<T>* left, RowView<T>* right) {
  left->data = argument.Data<T>();
  left->column_stride = argument.strides.last();
  *right = *left;
  right->data += columns * right->column_stride;
}

struct FwdInputs {
  Argument o1, probs;
  Dims shape;  // o2_s's
  phi::Place place;
};

FwdInputs ReadFwdInputs(const Tensor& o1, const Tensor& probs) {
  FwdInputs in = {ReadTensor("o1", o1), ReadTensor("unzipped_probs", probs), {}, {}};
  CheckDtype(in.o1, {kBf16});
  CheckDtype(in.probs, {kFp32});
  in.shape = CheckShapes(in.o1.shape, in.probs.shape);
  in.place = CheckPlaces({&in.o1, &in.probs});
  return in;
}

Tensor Forward(const char* function, const Tensor& o1_tensor, const Tensor& probs_tensor, float clamp) {
  const auto [o1, probs, shape, place] = ReadFwdInputs(o1_tensor, probs_tensor);
  const Tensor output = AllocateOutput(shape, kBf16, place);
  if (shape.numel() == 0) return output;
  const Argument o2_s = ReadTensor("o2_s", output);

  SwigluWeightedFwdParams params = {};
  params.intermediate_size = shape.last();
  params.clamp = clamp;
  params.fresh_outputs = true;
  params.space = MergeLeadingDims(o1.shape.rank - 1, o1.shape.at, {o1.strides.at, probs.strides.at, o2_s.strides.at},
                                  params.gate, params.probs, params.output);
  SetHalves(o1, shape.last(), &params.gate, &params.up);
  SetView(probs, &params.probs);
  SetView(o2_s, &params.output);
  Launch<LaunchSwigluWeightedFwdCpu, LaunchSwigluWeightedFwdCuda>(function, params, place, o1_tensor);
  return output;
}

struct Inputs {
  Argument o1, do2_s, probs;
};

Inputs ReadInputs(const Tensor& o1, const Tensor& do2_s, const Tensor& probs) {
  const Inputs in = {ReadTensor("o1", o1), ReadTensor("do2_s", do2_s), ReadTensor("unzipped_probs", probs)};
  CheckDtype(in.o1, {kBf16});
  CheckDtype(in.do2_s, {kBf16});
  CheckDtype(in.probs, {kFp32});
  CheckShapes(in.o1.shape, in.do2_s.shape, in.probs.shape);
  return in;
}

// What a call writes. Wanted tensors that the caller did not pass are allocated once all checks have passed.
struct Outputs {
  Tensor do1, probs_grad, o2_s;
  bool want_do1 = true, want_probs_grad = true, want_o2_s = true;
};

void Backward(const char* function, const Inputs& in, float clamp, const phi::Place& place, Outputs* out) {
  const auto allocate = [&](bool wanted, const Argument& like, Tensor* tensor) {
    const bool fresh = wanted && !tensor->defined();
    if (fresh) *tensor = AllocateOutput(like.shape, like.dtype, place);
    return fresh;
  };
  const bool fresh_do1 = allocate(out->want_do1, in.o1, &out->do1);
  allocate(out->want_probs_grad, in.probs, &out->probs_grad);
  const bool fresh_o2_s = allocate(out->want_o2_s, in.do2_s, &out->o2_s);
  const Argument do1 = ReadOutput("do1", out->want_do1, out->do1);
  const Argument probs_grad = ReadOutput("probs_grad", out->want_probs_grad, out->probs_grad);
  const Argument o2_s = ReadOutput("o2_s", out->want_o2_s, out->o2_s);
  if (in.do2_s.shape.numel() == 0) {
    if (out->want_probs_grad) FillZeros(probs_grad);  // sums of no terms, where there are rows
    return;
  }

  SwigluWeightedBwdParams params = {};
  const int64_t columns = in.do2_s.shape.last();
  params.intermediate_size = columns;
  params.clamp = clamp;
  params.fresh_outputs = fresh_do1 || fresh_o2_s;
  params.space = MergeLeadingDims(
      in.o1.shape.rank - 1, in.o1.shape.at,
      {in.o1.strides.at, in.do2_s.strides.at, in.probs.strides.at, do1.strides.at, o2_s.strides.at, probs_grad.strides.at},
      params.gate, params.output_grad, params.probs, params.gate_grad, params.output, params.probs_grad);
  SetHalves(in.o1, columns, &params.gate, &params.up);
  SetView(in.do2_s, &params.output_grad);
  SetView(in.probs, &params.probs);
  if (out->want_do1) SetHalves(do1, columns, &params.gate_grad, &params.up_grad);
  if (out->want_probs_grad) SetView(probs_grad, &params.probs_grad);
  if (out->want_o2_s) SetView(o2_s, &params.output);
  Launch<LaunchSwigluWeightedBwdCpu, LaunchSwigluWeightedBwdCuda>(function, params, place, *in.o1.tensor);
}

phi::Place PlaceOf(const Inputs& in) { return CheckPlaces({&in.o1, &in.do2_s, &in.probs}); }

// ---- The registered ops, for graphs

std::vector<Tensor> BwdKernel(const Tensor& o1, const Tensor& do2_s, const Tensor& probs, float clamp_value) {
  return WithPaddleErrors(kBwd, [&]() -> std::vector<Tensor> {
    const Inputs in = ReadInputs(o1, do2_s, probs);
    Outputs out;
    Backward(kBwd, in, ClampOfAttribute(clamp_value), PlaceOf(in), &out);
    return {out.do1, out.probs_grad, out.o2_s};
  });
}

std::vector<Shape> BwdInferShape(const Shape& o1, const Shape& do2_s, const Shape& probs) {
  WithPaddleErrors(kBwd, [&] { CheckBwdShapes(o1, do2_s, probs); });
  return {o1, probs, do2_s};
}

using Dtype = paddle::DataType;

std::vector<Dtype> BwdInferDtype(const Dtype& o1, const Dtype& do2_s, const Dtype& probs) { return {o1, probs, do2_s}; }

std::vector<Tensor> NoGradient(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                               float) {
  ThrowNoGradient(kBwd);
}

std::vector<Tensor> FwdKernel(const Tensor& o1, const Tensor& probs, float clamp_value) {
  return WithPaddleErrors(
      kFwd, [&]() -> std::vector<Tensor> { return {Forward(kFwd, o1, probs, ClampOfAttribute(clamp_value))}; });
}

std::vector<Shape> FwdInferShape(const Shape& o1, const Shape& probs) {
  return WithPaddleErrors(kFwd, [&]() -> std::vector<Shape> {
    return {CheckShapes(MakeDims("o1", o1), MakeDims("unzipped_probs", probs)).vector()};
  });
}

std::vector<Dtype> FwdInferDtype(const Dtype& o1, const Dtype&) { return {o1}; }

std::vector<Tensor> FwdGradKernel(const Tensor& o1, const Tensor& probs, const Tensor& do2_s, float clamp_value) {
  return WithPaddleErrors(kFwd, [&]() -> std::vector<Tensor> {
    const Inputs in = ReadInputs(o1, do2_s, probs);
    Outputs out;
    out.want_o2_s = false;
    Backward(kFwd, in, ClampOfAttribute(clamp_value), PlaceOf(in), &out);
    return {out.do1, out.probs_grad};
  });
}

std::vector<Shape> FwdGradInferShape(const Shape& o1, const Shape& probs, const Shape&) { return {o1, probs}; }
std::vector<Dtype> FwdGradInferDtype(const Dtype& o1, const Dtype& probs, const Dtype&) { return {o1, probs}; }

#ifdef PD_INFER_SPMD_RULE
SpmdInfo BwdSpmd(const DistMetaTensor& o1, const DistMetaTensor& do2_s, const DistMetaTensor& probs, float) {
  const RowSharding split(o1.dims().size() - 1, {&o1, &do2_s, &probs});
  return {{split.Rows(o1), split.Rows(do2_s), split.Rows(probs)}, {split.Rows(o1), split.Rows(probs), split.Rows(do2_s)}};
}

SpmdInfo FwdSpmd(const DistMetaTensor& o1, const DistMetaTensor& probs, float) {
  const RowSharding split(o1.dims().size() - 1, {&o1, &probs});
  return {{split.Rows(o1), split.Rows(probs)}, {split.Rows(o1)}};
}

SpmdInfo FwdGradSpmd(const DistMetaTensor& o1, const DistMetaTensor& probs, const DistMetaTensor& do2_s, float) {
  const RowSharding split(o1.dims().size() - 1, {&o1, &do2_s, &probs});
  return {{split.Rows(o1), split.Rows(probs), split.Rows(do2_s)}, {split.Rows(o1), split.Rows(probs)}};
}
#endif

}  // namespace

void CheckSwigluWeightedFwdShapes(const Shape& o1, const Shape& unzipped_probs) {
  WithPythonErrors(kFwd, [&] { CheckFwdShapes(o1, unzipped_probs); });
}

void CheckSwigluWeightedBwdShapes(const Shape& o1, const Shape& do2_s, const Shape& unzipped_probs) {
  WithPythonErrors(kBwd, [&] { CheckBwdShapes(o1, do2_s, unzipped_probs); });
}

double CheckedClampValue(const std::string& function, py::handle clamp_value) {
  return WithPythonErrors(function.c_str(), [&] { return clamp_value.is_none() ? 0.0 : double(CheckClamp(clamp_value)); });
}

// ---- The eager entries

void CheckFusedSwigluWeighted(py::handle o1, py::handle unzipped_probs, py::handle clamp_value) {
  WithPythonErrors(kFwd, [&] {
    const Tensor& o1_tensor = CheckTensor("o1", o1);
    const Tensor& probs_tensor = CheckTensor("unzipped_probs", unzipped_probs);
    CheckClamp(clamp_value);
    if (!AnyDist({{"o1", &o1_tensor}, {"unzipped_probs", &probs_tensor}})) ReadFwdInputs(o1_tensor, probs_tensor);
  });
}

py::object FusedSwigluWeighted(py::handle o1, py::handle unzipped_probs, py::handle clamp_value) {
  return WithPythonErrors(kFwd, [&]() -> py::object {
    const Tensor& o1_tensor = CheckTensor("o1", o1);
    const Tensor& probs_tensor = CheckTensor("unzipped_probs", unzipped_probs);
    if (AnyDist({{"o1", &o1_tensor}, {"unzipped_probs", &probs_tensor}})) return py::none();
    const float clamp = CheckClamp(clamp_value);
    return ToPython(WithoutGil([&] { return Forward(kFwd, o1_tensor, probs_tensor, clamp); }));
  });
}

py::object FusedSwigluWeightedBwd(py::handle o1, py::handle do2_s, py::handle unzipped_probs) {
  return WithPythonErrors(kBwd, [&]() -> py::object {
    const Tensor& o1_tensor = CheckTensor("o1", o1);
    const Tensor& do2_s_tensor = CheckTensor("do2_s", do2_s);
    const Tensor& probs_tensor = CheckTensor("unzipped_probs", unzipped_probs);
    if (AnyDist({{"o1", &o1_tensor}, {"do2_s", &do2_s_tensor}, {"unzipped_probs", &probs_tensor}})) return py::none();
    const Inputs in = ReadInputs(o1_tensor, do2_s_tensor, probs_tensor);
    const phi::Place place = PlaceOf(in);
    Outputs out;
    WithoutGil([&] { Backward(kBwd, in, kNoClamp, place, &out); });
    return py::make_tuple(ToPython(out.do1), ToPython(out.probs_grad), ToPython(out.o2_s));
  });
}

py::object FusedSwigluWeightedBwdOut(const std::string& function, py::handle o1, py::handle do2_s, py::handle unzipped_probs,
                                     py::handle clamp_value, py::handle do1, py::handle probs_grad, py::handle o2_s,
                                     bool want_do1, bool want_probs_grad, bool want_o2_s) {
  return WithPythonErrors(function.c_str(), [&]() -> py::object {
    const Tensor& o1_tensor = CheckTensor("o1", o1);
    const Tensor& do2_s_tensor = CheckTensor("do2_s", do2_s);
    const Tensor& probs_tensor = CheckTensor("unzipped_probs", unzipped_probs);
    if (AnyDist({{"o1", &o1_tensor}, {"do2_s", &do2_s_tensor}, {"unzipped_probs", &probs_tensor}})) return py::none();
    const float clamp = CheckClamp(clamp_value);
    const Inputs in = ReadInputs(o1_tensor, do2_s_tensor, probs_tensor);
    const OptionalArgument given_do1 = ReadOptional("do1", do1), given_probs_grad = ReadOptional("probs_grad", probs_grad),
                           given_o2_s = ReadOptional("o2_s", o2_s);
    CheckDtype(given_do1, {kBf16});
    CheckDtype(given_probs_grad, {kFp32});
    CheckDtype(given_o2_s, {kBf16});
    CheckShape(given_do1, in.o1.shape, "o1's");
    CheckShape(given_probs_grad, in.probs.shape, "unzipped_probs'");
    CheckShape(given_o2_s, in.do2_s.shape, "do2_s'");
    const phi::Place place =
        CheckPlaces({&in.o1, &in.do2_s, &in.probs, &given_do1.argument, &given_probs_grad.argument, &given_o2_s.argument});

    for (const OptionalArgument* output : {&given_do1, &given_probs_grad, &given_o2_s}) CheckWritable(*output);
    CheckNoOverlapUnlessSame(given_do1, in.o1);
    CheckNoOverlap(given_do1, in.do2_s);
    CheckNoOverlap(given_do1, in.probs);
    CheckNoOverlapUnlessSame(given_o2_s, in.do2_s);
    CheckNoOverlap(given_o2_s, in.o1);
    CheckNoOverlap(given_o2_s, in.probs);
    for (const Argument* input : {&in.o1, &in.do2_s, &in.probs}) CheckNoOverlap(given_probs_grad, *input);
    CheckNoOverlap(given_do1, given_o2_s);
    CheckNoOverlap(given_do1, given_probs_grad);
    CheckNoOverlap(given_o2_s, given_probs_grad);

    Outputs out = {
        TensorOf(given_do1), TensorOf(given_probs_grad), TensorOf(given_o2_s), want_do1, want_probs_grad, want_o2_s};
    WithoutGil([&] { Backward(function.c_str(), in, clamp, place, &out); });
    return py::make_tuple(ToResult(want_do1, given_do1, &out.do1),
                          ToResult(want_probs_grad, given_probs_grad, &out.probs_grad),
                          ToResult(want_o2_s, given_o2_s, &out.o2_s));
  });
}

}  // namespace paddle_gated_ops

PD_BUILD_OP(gated_fused_swiglu_weighted_bwd)
    .Inputs({"o1", "do2_s", "unzipped_probs"})
    .Outputs({"do1", "probs_grad", "o2_s"})
    .Attrs({"clamp_value: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::BwdKernel))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::BwdInferShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::BwdInferDtype)) GATED_OPS_SPMD_RULE(paddle_gated_ops::BwdSpmd);

PD_BUILD_GRAD_OP(gated_fused_swiglu_weighted_bwd)
    .Inputs({"o1", "do2_s", "unzipped_probs", paddle::Grad("do1"), paddle::Grad("probs_grad"), paddle::Grad("o2_s")})
    .Outputs({paddle::Grad("o1"), paddle::Grad("do2_s"), paddle::Grad("unzipped_probs")})
    .Attrs({"clamp_value: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::NoGradient));

PD_BUILD_OP(gated_fused_swiglu_weighted)
    .Inputs({"o1", "unzipped_probs"})
    .Outputs({"o2_s"})
    .Attrs({"clamp_value: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::FwdKernel))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::FwdInferShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::FwdInferDtype)) GATED_OPS_SPMD_RULE(paddle_gated_ops::FwdSpmd);

PD_BUILD_GRAD_OP(gated_fused_swiglu_weighted)
    .Inputs({"o1", "unzipped_probs", paddle::Grad("o2_s")})
    .Outputs({paddle::Grad("o1"), paddle::Grad("unzipped_probs")})
    .Attrs({"clamp_value: float"})
    .SetKernelFn(PD_KERNEL(paddle_gated_ops::FwdGradKernel))
    .SetInferShapeFn(PD_INFER_SHAPE(paddle_gated_ops::FwdGradInferShape))
    .SetInferDtypeFn(PD_INFER_DTYPE(paddle_gated_ops::FwdGradInferDtype)) GATED_OPS_SPMD_RULE(paddle_gated_ops::FwdGradSpmd);
