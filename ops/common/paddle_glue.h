// Everything the ops' *_op.cc share that knows Paddle: argument checks, outputs, streams, error types.
#pragma once

// pybind11 and the three functions below, not paddle/utils/pybind.h: that header of Paddle 3.3 pulls in cuBLAS where it is
// a GPU build, which a machine with nvcc alone lacks.
#include <pybind11/pybind11.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/huge_pages.h"
#include "common/overlap.h"
#include "common/row_space.h"
#include "paddle/common/ddim.h"
#include "paddle/phi/api/all.h"
// These include cuBLAS, cuDNN and more in a GPU build, 2.6 of versions of its time; what they declare here does not depend
// on it.
#pragma push_macro("PADDLE_WITH_CUDA")
#undef PADDLE_WITH_CUDA
#include "paddle/phi/common/memory_utils.h"
#include "paddle/phi/core/dense_tensor.h"
#include "paddle/phi/core/enforce.h"
#pragma pop_macro("PADDLE_WITH_CUDA")

#ifdef PADDLE_GATED_OPS_WITH_CUDA
#include "common/cuda_error.h"
#include "common/device_guard.h"
#endif

namespace paddle {
namespace pybind {
bool PyCheckTensor(PyObject* obj);
paddle::Tensor& CastPyArg2Tensor(PyObject* obj, Py_ssize_t arg_pos);
PyObject* ToPyObject(const paddle::Tensor& value, bool return_py_none_if_not_initialize);
}  // namespace pybind
}  // namespace paddle

namespace paddle_gated_ops {

namespace py = pybind11;

// ---- Errors. Checks throw ArgumentError; the eager entry turns it into Python's type, a registered op into Paddle's.

class ArgumentError : public std::exception {
 public:
  enum Kind { kType, kValue };
  ArgumentError(Kind kind, std::string message) : kind(kind), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  const Kind kind;

 private:
  std::string message_;
};

inline std::string ToString(const char* text) { return text; }
inline std::string ToString(const std::string& text) { return text; }
inline std::string ToString(int64_t number) { return std::to_string(number); }
inline std::string ToString(int number) { return std::to_string(number); }
inline std::string ToString(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", number);
  return text;
}

template <typename... Parts>
std::string Text(const Parts&... parts) {
  return (std::string() + ... + ToString(parts));
}

[[noreturn]] inline void ThrowValueError(const std::string& message) { throw ArgumentError(ArgumentError::kValue, message); }
[[noreturn]] inline void ThrowTypeError(const std::string& message) { throw ArgumentError(ArgumentError::kType, message); }

// A kernel could not be launched.
class LaunchError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Whether Paddle had no memory to give. It says so by exceptions of several types, not all of them in public headers, which
// its own functions raise as MemoryError.
inline bool IsOutOfMemory(const std::exception& error) { return std::strstr(error.what(), "ResourceExhausted") != nullptr; }

// The body of an eager entry: errors as TypeError and ValueError, prefixed with the function's name.
template <typename Body>
auto WithPythonErrors(const char* function, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const ArgumentError& error) {
    const std::string message = Text(function, ": ", error.what());
    if (error.kind == ArgumentError::kType) throw py::type_error(message);
    throw py::value_error(message);
  } catch (const py::error_already_set&) {
    throw;
  } catch (const std::exception& error) {
    if (!IsOutOfMemory(error)) throw;
    PyErr_SetString(PyExc_MemoryError, error.what());
    throw py::error_already_set();
  }
}

// The body of a registered op's kernel or infer function: Paddle lets only its own exception reach Python.
template <typename Body>
auto WithPaddleErrors(const char* function, const Body& body) -> decltype(body()) {
  try {
    return body();
  } catch (const ArgumentError& error) {
    PADDLE_THROW(common::errors::InvalidArgument("%s: %s", function, error.what()));
  } catch (const LaunchError& error) {
    PADDLE_THROW(common::errors::External("%s", error.what()));
  }
}

// The kernel of a backward op's own gradient op. That op exists because append_backward of the legacy IR, which to_static
// always runs, asks for the gradient op of each op it meets, whether its result is wanted or not.
[[noreturn]] inline void ThrowNoGradient(const char* function) {
  PADDLE_THROW(common::errors::Unimplemented("%s is a backward: it has no gradient of its own", function));
}

// ---- Shapes

constexpr int64_t kUnknown = -1;  // a dimension that a graph does not know yet

struct Dims {
  int rank = 0;
  int64_t at[kMaxViewDims] = {};

  Dims() = default;
  Dims(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) at[rank++] = size;
  }
  int64_t last() const { return at[rank - 1]; }
  int64_t numel() const {
    int64_t product = 1;
    for (int d = 0; d < rank; ++d) product *= at[d];
    return product;
  }
  std::vector<int64_t> vector() const { return {at, at + rank}; }
};

template <typename Sizes>
Dims MakeDims(const char* name, const Sizes& sizes, int rank) {
  if (rank > kMaxViewDims) ThrowValueError(Text(name, " must have at most ", kMaxViewDims, " dimensions, but has ", rank));
  Dims dims;
  for (int d = 0; d < rank; ++d) dims.at[dims.rank++] = sizes[d];
  return dims;
}

inline Dims MakeDims(const char* name, const std::vector<int64_t>& sizes) {
  return MakeDims(name, sizes, int(sizes.size()));
}

inline std::string ToString(const Dims& dims) {
  std::string text = "[";
  for (int d = 0; d < dims.rank; ++d) text += Text(d == 0 ? "" : ", ", dims.at[d]);
  return text + "]";
}

// Equal as far as both are known.
inline bool Matches(const Dims& a, const Dims& b) {
  bool equal = a.rank == b.rank;
  for (int d = 0; d < a.rank && equal; ++d) equal = a.at[d] == b.at[d] || a.at[d] == kUnknown || b.at[d] == kUnknown;
  return equal;
}

inline void CheckShape(const char* name, const Dims& shape, const Dims& expected, const char* meaning) {
  if (!Matches(shape, expected)) {
    ThrowValueError(Text(name, " must have shape ", ToString(expected), " (", meaning, "), but has ", ToString(shape)));
  }
}

// ---- Tensors

// A tensor argument, its metadata read once.
struct Argument {
  const char* name;
  const paddle::Tensor* tensor;
  Dims shape;
  Dims strides;  // elements
  paddle::DataType dtype;
  phi::Place place;
  bool has_place;  // an empty tensor may have no memory, and then no place
  void* data;      // null for an empty tensor

  template <typename T>
  T* Data() const {
    return static_cast<T*>(data);
  }
  MemoryView Memory() const {
    MemoryView view = {static_cast<const char*>(data), int64_t(phi::SizeOf(dtype)), shape.rank, {}, {}};
    std::copy(shape.at, shape.at + shape.rank, view.sizes);
    std::copy(strides.at, strides.at + shape.rank, view.strides);
    return view;
  }
};

inline Argument ReadTensor(const char* name, const paddle::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_dense_tensor()) ThrowValueError(Text(name, " must be a dense tensor with memory"));
  Argument argument = {};
  argument.name = name;
  argument.tensor = &tensor;
  argument.shape = MakeDims(name, tensor.dims(), tensor.dims().size());
  argument.dtype = tensor.dtype();
  if (argument.shape.numel() > 0) {
    if (!tensor.initialized()) ThrowValueError(Text(name, " must be initialized, but has no memory"));
    argument.data = const_cast<void*>(tensor.data());
    if (reinterpret_cast<uintptr_t>(argument.data) % phi::SizeOf(argument.dtype) != 0) {
      ThrowValueError(Text(name, " must begin at a multiple of its items' size, but is a view that begins between two"));
    }
  }
  try {
    argument.place = tensor.place();
    argument.has_place = true;
  } catch (const std::exception&) {  // how Paddle says that an empty tensor has no allocation
    argument.has_place = false;
  }
  if (tensor.strides().size() == argument.shape.rank) {
    argument.strides = MakeDims(name, tensor.strides(), argument.shape.rank);
  } else {  // made without strides: contiguous
    argument.strides.rank = argument.shape.rank;
    int64_t stride = 1;
    for (int d = argument.shape.rank - 1; d >= 0; --d) {
      argument.strides.at[d] = stride;
      stride *= argument.shape.at[d];
    }
  }
  return argument;
}

// Densely laid out, row by row; strides of dimensions of size 1 do not matter, nor those of an empty tensor.
inline bool IsContiguous(const Argument& argument) {
  if (argument.shape.numel() == 0) return true;
  int64_t stride = 1;
  for (int d = argument.shape.rank - 1; d >= 0; --d) {
    if (argument.shape.at[d] != 1 && argument.strides.at[d] != stride) return false;
    stride *= argument.shape.at[d];
  }
  return true;
}

inline void CheckDtype(const Argument& argument, std::initializer_list<paddle::DataType> allowed) {
  std::string names;
  for (const paddle::DataType dtype : allowed) {
    if (argument.dtype == dtype) return;
    names += Text(names.empty() ? "" : " or ", phi::DataTypeToString(dtype));
  }
  ThrowValueError(Text(argument.name, " must have dtype ", names, ", but has ", phi::DataTypeToString(argument.dtype)));
}

inline bool IsDist(const paddle::Tensor& tensor) { return tensor.defined() && tensor.is_dist_tensor(); }

struct NamedTensor {
  const char* name;
  const paddle::Tensor* tensor;
};

// Whether one is a DistTensor, so that the registered op serves the call. Paddle makes the others DistTensors too, and ends
// the process where it can't: they are checked first.
inline bool AnyDist(std::initializer_list<NamedTensor> tensors) {
  bool any = false;
  for (const NamedTensor& each : tensors) any = any || IsDist(*each.tensor);
  for (const NamedTensor& each : tensors) {
    if (any && !IsDist(*each.tensor)) ReadTensor(each.name, *each.tensor);
  }
  return any;
}

inline bool IsSupportedPlace(const phi::Place& place) {
#ifdef PADDLE_GATED_OPS_WITH_CUDA
  if (place.GetType() == phi::AllocationType::GPU) return true;
#endif
  return place.GetType() == phi::AllocationType::CPU;
}

// The one place of all arguments; the CPU where none has memory. Pinned memory and other devices are refused.
inline phi::Place CheckPlaces(std::initializer_list<const Argument*> arguments) {
  const Argument* first = nullptr;
  for (const Argument* argument : arguments) {
    if (!argument->has_place) continue;
    if (!IsSupportedPlace(argument->place)) {
      ThrowValueError(Text(argument->name, " must be on the CPU or a GPU that paddle_gated_ops is built for, but is on ",
                           argument->place.DebugString()));
    }
    if (first == nullptr) {
      first = argument;
    } else if (argument->place != first->place) {
      ThrowValueError(Text(argument->name, " must be on ", first->place.DebugString(), " as ", first->name,
                           " is, but is on ", argument->place.DebugString()));
    }
  }
  return first != nullptr ? first->place : phi::CPUPlace();
}

// ---- Eager arguments

inline std::string TypeName(py::handle object) { return Py_TYPE(object.ptr())->tp_name; }

inline paddle::Tensor& CheckTensor(const char* name, py::handle object) {
  if (!paddle::pybind::PyCheckTensor(object.ptr())) {
    ThrowTypeError(Text(name, " must be a paddle.Tensor, but is ", TypeName(object)));
  }
  return paddle::pybind::CastPyArg2Tensor(object.ptr(), 0);
}

// Whether one of the objects is a DistTensor. Safe for tensors without content, unlike 2.6's Tensor.is_dist().
inline bool AnyDistTensor(const py::args& objects) {
  bool any = false;
  for (const py::handle object : objects) {
    any = any || (paddle::pybind::PyCheckTensor(object.ptr()) && IsDist(paddle::pybind::CastPyArg2Tensor(object.ptr(), 0)));
  }
  return any;
}

// TypeError for what is no Tensor, ValueError for one that is neither dense nor a DistTensor, or has no memory.
inline void CheckTensorArgument(const std::string& function, const std::string& name, py::handle object) {
  WithPythonErrors(function.c_str(), [&] {
    const paddle::Tensor& tensor = CheckTensor(name.c_str(), object);
    if (!IsDist(tensor)) ReadTensor(name.c_str(), tensor);
  });
}

// A real number; TypeError for what is none, bool and Tensor among them (reading a tensor would synchronize). One past the
// range of double, such as 10**400, is Inf, which the checks of its value refuse.
inline double CheckNumber(const char* name, py::handle object) {
  const bool real = PyFloat_CheckExact(object.ptr()) ||
                    (!PyBool_Check(object.ptr()) && py::isinstance(object, py::module_::import("numbers").attr("Real")));
  if (!real) ThrowTypeError(Text(name, " must be a float, but is ", TypeName(object)));
  const double value = PyFloat_AsDouble(object.ptr());
  if (value == -1.0 && PyErr_Occurred()) {
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw py::error_already_set();
    PyErr_Clear();
    return std::numeric_limits<double>::infinity();
  }
  return value;
}

inline bool CheckBool(const char* name, py::handle object) {
  if (!PyBool_Check(object.ptr())) ThrowTypeError(Text(name, " must be a bool, but is ", TypeName(object)));
  return object.ptr() == Py_True;
}

inline py::object ToPython(const paddle::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(paddle::pybind::ToPyObject(tensor, false));
}

// Other Python threads run while the body computes. It must not touch Python objects.
template <typename Body>
auto WithoutGil(const Body& body) -> decltype(body()) {
  const py::gil_scoped_release release;
  return body();
}

// ---- Outputs

inline bool PoisonOutputs() {
  static const bool poison = [] {
    const char* text = std::getenv("GATED_OPS_POISON_OUTPUTS");
    return text != nullptr && std::strcmp(text, "1") == 0;
  }();
  return poison;
}

inline void* CurrentStream(const paddle::Tensor& tensor) {
#ifdef PADDLE_GATED_OPS_WITH_CUDA
  if (tensor.place().GetType() == phi::AllocationType::GPU) return tensor.stream();
#endif
  (void)tensor;
  return nullptr;
}

#ifdef PADDLE_GATED_OPS_WITH_CUDA
inline void CheckCuda(const char* function, int status, int device) {
  const auto error = cudaError_t(status);
  if (error == cudaSuccess) return;
  // Raised here, it is not left for the next caller of cudaGetLastError to find.
  if (cudaPeekAtLastError() == error) cudaGetLastError();
  throw LaunchError(Text(function, ": ", DescribeCudaError(error, device, PADDLE_GATED_OPS_GPU_CODE)));
}
#endif

// Sets bytes of a tensor's memory, on its current stream.
inline void FillBytes(const paddle::Tensor& tensor, void* data, int64_t bytes, int byte) {
#ifdef PADDLE_GATED_OPS_WITH_CUDA
  if (tensor.place().GetType() == phi::AllocationType::GPU) {
    const int device = tensor.place().GetDeviceId();
    const DeviceGuard guard(device);
    CheckCuda("cudaSetDevice", guard.status(), device);
    const auto stream = static_cast<cudaStream_t>(CurrentStream(tensor));
    CheckCuda("cudaMemsetAsync", cudaMemsetAsync(data, byte, bytes, stream), device);
    return;
  }
#endif
  (void)tensor;
  std::memset(data, byte, bytes);
}

// Zeros in each element of a tensor of any strides: item by item where it is not dense, as only sums of no terms need it.
inline void FillZeros(const Argument& argument) {
  const int64_t itemsize = phi::SizeOf(argument.dtype), count = argument.shape.numel();
  if (count == 0) return;
  if (IsContiguous(argument)) return FillBytes(*argument.tensor, argument.data, count * itemsize, 0);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i, offset = 0;
    for (int d = argument.shape.rank - 1; d >= 0; --d) {
      offset += rest % argument.shape.at[d] * argument.strides.at[d];
      rest /= argument.shape.at[d];
    }
    FillBytes(*argument.tensor, argument.Data<char>() + offset * itemsize, itemsize, 0);
  }
}

// A new tensor whose every element the caller is going to write. The tests set GATED_OPS_POISON_OUTPUTS=1, which shows
// what a kernel leaves unwritten as NaN. paddle::empty takes half a microsecond more than the allocator itself, but a
// phi::DenseTensor made here would be smaller than Paddle 2.6's own, whose size depends on how Paddle was built.
inline paddle::Tensor AllocateOutput(const Dims& shape, paddle::DataType dtype, const phi::Place& place) {
  if (shape.numel() == 0) {
    // The executors of 2.6 take an output without memory for one that was not written: this one has some.
    const paddle::Tensor tensor = paddle::empty({1}, dtype, place);
    static_cast<phi::DenseTensor&>(*tensor.impl()).Resize(common::make_ddim(shape.vector()));
    return tensor;
  }
  paddle::Tensor tensor = paddle::empty(shape.vector(), dtype, place);
  const int64_t bytes = shape.numel() * int64_t(phi::SizeOf(dtype));
  if (place.GetType() == phi::AllocationType::CPU) AdviseHugePages(tensor.data(), bytes);
  if (PoisonOutputs()) FillBytes(tensor, tensor.data(), bytes, 0xff);
  return tensor;
}

// Memory that only the kernels of one launch see; `tensor` knows the current stream. It comes from that stream's pool and
// goes back there. A new tensor's would go back to the pool of Paddle's default stream, and from there to whoever asks next,
// while the kernels of a side stream still use it.
inline std::shared_ptr<phi::Allocation> AllocateScratch(int64_t bytes, const phi::Place& place,
                                                        const paddle::Tensor& tensor) {
  const phi::Stream stream(reinterpret_cast<phi::StreamId>(CurrentStream(tensor)));
  std::shared_ptr<phi::Allocation> scratch = place.GetType() == phi::AllocationType::GPU
                                                 ? phi::memory_utils::AllocShared(place, bytes, stream)
                                                 : phi::memory_utils::AllocShared(place, bytes);
  if (PoisonOutputs()) FillBytes(tensor, scratch->ptr(), bytes, 0xff);
  return scratch;
}

// ---- Views and launches

// [rows, columns] of a tensor that has columns, or [rows] of one that has none.
template <typename T>
void SetView(const Argument& argument, RowView<T>* view) {
  view->data = argument.Data<T>();
  view->column_stride = argument.strides.rank > 0 ? argument.strides.last() : 1;
}

// Calls the launcher of the place; `tensor` is one of its tensors, which knows the current stream. The launchers are
// template arguments, so that a CPU build refers to no CUDA launcher.
template <auto kCpuLauncher, auto kCudaLauncher, typename Params>
void Launch([[maybe_unused]] const char* function, const Params& params, [[maybe_unused]] const phi::Place& place,
            [[maybe_unused]] const paddle::Tensor& tensor) {
#ifdef PADDLE_GATED_OPS_WITH_CUDA
  if (place.GetType() == phi::AllocationType::GPU) {
    CheckCuda(function, kCudaLauncher(params, place.GetDeviceId(), CurrentStream(tensor)), place.GetDeviceId());
    return;
  }
#endif
  kCpuLauncher(params);
}

}  // namespace paddle_gated_ops
