// Outputs and scratch that the caller of an eager entry may pass: reading, checking, returning them.
#pragma once

#include "common/paddle_glue.h"

namespace paddle_gated_ops {

// A tensor argument that may be None. Hidden, because pybind11 hides the type of its field.
struct __attribute__((visibility("hidden"))) OptionalArgument {
  py::handle object;
  bool given;
  Argument argument;
};

inline OptionalArgument ReadOptional(const char* name, py::handle object) {
  OptionalArgument optional = {object, !object.is_none(), {}};
  if (optional.given) optional.argument = ReadTensor(name, CheckTensor(name, object));
  return optional;
}

inline void CheckDtype(const OptionalArgument& optional, std::initializer_list<paddle::DataType> allowed) {
  if (optional.given) CheckDtype(optional.argument, allowed);
}

inline void CheckShape(const OptionalArgument& optional, const Dims& expected, const char* meaning) {
  if (optional.given) CheckShape(optional.argument.name, optional.argument.shape, expected, meaning);
}

// A leaf that wants a gradient must not be written while gradients are recorded: autograd would not know.
inline void CheckNotTrainableLeaf(const char* name, py::handle object) {
  if (!object.attr("stop_gradient").cast<bool>() && object.attr("is_leaf").cast<bool>() &&
      py::module_::import("paddle").attr("is_grad_enabled")().cast<bool>()) {
    ThrowValueError(Text(name,
                         " is a leaf with stop_gradient=False, which must not be written while gradients are "
                         "enabled; pass a tensor with stop_gradient=True, or call under paddle.no_grad()"));
  }
}

// Whether an output can be written: each element has a place of its own, and autograd loses nothing.
inline void CheckWritable(const OptionalArgument& output) {
  if (!output.given) return;
  const Argument& argument = output.argument;
  if (MayOverlapItself(argument.Memory())) {
    ThrowValueError(Text(argument.name, " must have a place of its own for each element, but has shape ",
                         ToString(argument.shape), " and strides ", ToString(argument.strides)));
  }
  CheckNotTrainableLeaf(argument.name, output.object);
}

inline void CheckNoOverlap(const OptionalArgument& output, const Argument& other) {
  if (output.given && MayOverlap(output.argument.Memory(), other.Memory())) {
    ThrowValueError(Text(output.argument.name, " must not share memory with ", other.name));
  }
}

inline void CheckNoOverlap(const OptionalArgument& output, const OptionalArgument& other) {
  if (other.given) CheckNoOverlap(output, other.argument);
}

// Where a kernel reads each element before it writes its place, an output may be an input's memory.
inline void CheckNoOverlapUnlessSame(const OptionalArgument& output, const Argument& input) {
  if (!output.given || IsSameMemory(output.argument.Memory(), input.Memory())) return;
  if (MayOverlap(output.argument.Memory(), input.Memory())) {
    ThrowValueError(Text(output.argument.name, " must be exactly the memory of ", input.name,
                         " (same pointer and strides) or share none with it"));
  }
}

// The caller's tensor, where there is one; else an undefined one, which the op allocates.
inline paddle::Tensor TensorOf(const OptionalArgument& optional) {
  return optional.given ? *optional.argument.tensor : paddle::Tensor();
}

// An output about to be written; nothing, with null data, where it is not wanted.
inline Argument ReadOutput(const char* name, bool wanted, const paddle::Tensor& tensor) {
  return wanted ? ReadTensor(name, tensor) : Argument{};
}

// What the entry returns for an output: the caller's own object, its version bumped, or the new tensor, or None.
inline py::object ToResult(bool wanted, const OptionalArgument& given, paddle::Tensor* tensor) {
  if (!wanted) return py::none();
  if (!given.given) return ToPython(*tensor);
  tensor->bump_inplace_version();
  return py::reinterpret_borrow<py::object>(given.object);
}

}  // namespace paddle_gated_ops
