"""The registered names are our own: Paddle's built-in op, and another library's op of the plain name, stay theirs."""

import shutil

import pytest

from calls import run_python

OURS = [
    "gated_cake_rmsnorm_silu_gate",
    "gated_cake_rmsnorm_silu_gate_train_backward",
    "gated_cake_rmsnorm_silu_gate_train_backward_without_weight",
    "gated_fused_swiglu_weighted",
    "gated_fused_swiglu_weighted_bwd",
]

BUILT_IN = """
import numpy as np, paddle
import paddle.incubate.nn.functional as built_in
from paddle.base import core, framework

def state():
    registered = {proto.type for proto in framework.get_all_op_protos()}
    function = getattr(built_in, "fused_swiglu_weighted_bwd", None)
    try:
        tensors = [paddle.to_tensor(np.ones(s, np.uint16), dtype="bfloat16", place="cpu") for s in ([2, 8], [2, 4])]
        result = [type(function(*tensors, paddle.to_tensor(np.ones(2, np.float32), place="cpu")))]
    except Exception as error:
        result = [type(error), str(error)[-200:]]
    return registered, function, getattr(paddle._C_ops, "fused_swiglu_weighted_bwd", None), result

before = state()
import paddle_gated_ops
import paddle_gated_ops.incubate.nn.functional as F
after = state()
new = after[0] - before[0]
assert before[0] <= after[0], before[0] - after[0]
assert all(name.startswith("gated_") for name in new), new
assert before[1:] == after[1:], (before[1:], after[1:])
assert F.fused_swiglu_weighted_bwd is not after[1]
print(sorted(name for name in new if not name.endswith("_grad")))
"""


def test_built_in_op_is_unchanged():
    assert run_python(BUILT_IN) == str(sorted(OURS))


OTHER_SOURCE = """
#include "paddle/extension.h"

#define OTHER_OP(name)                                                                              \\
  std::vector<paddle::Tensor> name##_kernel(const paddle::Tensor& x) { return {x, x}; }             \\
  std::vector<std::vector<int64_t>> name##_shape(std::vector<int64_t> x) { return {x, x}; }         \\
  std::vector<paddle::DataType> name##_dtype(paddle::DataType x) { return {x, x}; }                 \\
  PD_BUILD_OP(name)                                                                                 \\
      .Inputs({"x"})                                                                                \\
      .Outputs({"first", "second"})                                                                 \\
      .SetKernelFn(PD_KERNEL(name##_kernel))                                                        \\
      .SetInferShapeFn(PD_INFER_SHAPE(name##_shape))                                                \\
      .SetInferDtypeFn(PD_INFER_DTYPE(name##_dtype));

OTHER_OP(cake_rmsnorm_silu_gate_train_backward)
OTHER_OP(fused_swiglu_weighted_bwd)
"""

BESIDE = """
import numpy as np, paddle

def load_other():
    from paddle.utils.cpp_extension.extension_utils import load_op_meta_info_and_register_op
    load_op_meta_info_and_register_op({library!r})

def load_ours():
    import paddle_gated_ops

for load in ({order}):
    load()

from calls import run_rmsnorm, run_swiglu
from paddle_gated_ops import testing
run_custom_op = getattr(paddle._C_ops, "_run_custom_op", None) or paddle.base.core.eager._run_custom_op
x = paddle.to_tensor(np.arange(3, dtype=np.float32), place="cpu")
for _ in range(2):
    for name in ("cake_rmsnorm_silu_gate_train_backward", "fused_swiglu_weighted_bwd"):
        other = run_custom_op(name, x)
        assert len(other) == 2 and other[0].tolist() == [0, 1, 2]
    inputs = testing.swiglu_weighted_inputs(4, 9)
    testing.assert_swiglu_weighted_bwd(inputs, run_swiglu(inputs, "cpu"))
    inputs = testing.rmsnorm_silu_gate_inputs(4)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, run_rmsnorm(inputs, "cpu"))
print("ok")
"""


@pytest.fixture(scope="module")
def other_library(tmp_path_factory):
    """A library of another project, with ops of the plain names."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler")
    import subprocess

    from paddle.utils.cpp_extension import CppExtension

    folder = tmp_path_factory.mktemp("other")
    source, library = folder / "other.cc", folder / "other.so"
    source.write_text(OTHER_SOURCE)
    flags = CppExtension(sources=[str(source)], extra_compile_args={"cxx": []})
    command = ["c++", "-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-DPADDLE_WITH_CUSTOM_KERNEL", str(source), "-o"]
    command += [str(library), *(f"-I{include}" for include in flags.include_dirs)]
    command += [*(f"-L{path}" for path in flags.library_dirs), *(f"-Wl,-rpath,{path}" for path in flags.library_dirs)]
    done = subprocess.run([*command, *flags.extra_link_args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(library)


@pytest.mark.parametrize("order", ["load_other, load_ours", "load_ours, load_other"])
def test_beside_a_library_with_the_plain_names(other_library, order):
    assert run_python(BESIDE.format(library=other_library, order=order)) == "ok"
