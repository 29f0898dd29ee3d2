// How a backward that is written in Python refuses to be recorded. What it raises would reach the caller as an OSError, as
// Paddle wraps it. What the autograd engine itself meets keeps its type, and the engine looks at every gradient that a
// backward returns: this one answers with Paddle's Unimplemented error, in Python NotImplementedError.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "common/paddle_glue.h"
#include "paddle/phi/core/tensor_base.h"

namespace paddle_gated_ops {

// A tensor that has nothing to look at. All of this overrides; has_allocation only in newer Paddle, so none says so.
class NoGradientTensor : public phi::TensorBase {
 public:
  explicit NoGradientTensor(std::string message) : message_(std::move(message)) {}

  int64_t numel() const { Throw(); }
  const phi::DDim& dims() const { Throw(); }
  phi::DataType dtype() const { Throw(); }
  phi::DataLayout layout() const { Throw(); }
  const phi::Place& place() const { Throw(); }
  bool valid() const { Throw(); }
  bool initialized() const { Throw(); }
  bool has_allocation() const { Throw(); }
  void* AllocateFrom(phi::Allocator*, phi::DataType, size_t, bool) { Throw(); }

 private:
  [[noreturn]] void Throw() const { PADDLE_THROW(common::errors::Unimplemented("%s", message_)); }

  std::string message_;
};

inline py::object MakeNoGradientTensor(std::string message) {
  const py::object object = ToPython(paddle::Tensor());  // which looks at what it is given
  CheckTensor("tensor", object).set_impl(std::make_shared<NoGradientTensor>(std::move(message)));
  return object;
}

}  // namespace paddle_gated_ops
