"""When the machine fails: no memory, a launch that is refused, code for another GPU. The error is clear, and all goes on."""

import ctypes
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import paddle
import pytest

import paddle_gated_ops.incubate.nn.functional as F
from calls import array_of, assert_same_bits, run_rmsnorm, run_swiglu, tensor_of, tensors_of
from cuda_runtime import ROOT, named
from paddle_gated_ops import testing

# ---- Out of memory: rows that lie all in one place ask for more than there is


def huge(place, rows=2**42):
    bf16, fp32 = tensor_of(np.full(256, 0x3F80, np.uint16), place), tensor_of(np.ones(256, np.float32), place)
    return {
        "o1": paddle.as_strided(bf16, [rows, 2], [0, 1]),
        "do2_s": paddle.as_strided(bf16, [rows, 1], [0, 1]),
        "unzipped_probs": paddle.as_strided(fp32, [rows], [0]),
        **{name: paddle.as_strided(bf16, [rows, 128], [0, 1]) for name in ("grad_out", "x", "z")},
        "weight": bf16[:128],
    }


CALLS = {
    "fused_swiglu_weighted": ("o1", "unzipped_probs"),
    "fused_swiglu_weighted_bwd": ("o1", "do2_s", "unzipped_probs"),
    "fused_swiglu_weighted_bwd_out": ("o1", "do2_s", "unzipped_probs"),
    "cake_rmsnorm_silu_gate": ("x", "z", "weight"),
    "cake_rmsnorm_silu_gate_train_forward": ("x", "z", "weight"),
    "cake_rmsnorm_silu_gate_train_backward": ("grad_out", "x", "z", "weight"),
}


@pytest.mark.parametrize("function", CALLS)
def test_out_of_memory(place, function):
    if place != "cpu" and not function.endswith("backward") and not function.endswith("bwd"):
        pytest.skip("a GPU build's allocator takes tens of seconds to refuse: one call of each op does")
    if place == "cpu":
        with pytest.raises(MemoryError) as own:  # what Paddle's own functions raise
            paddle.empty([2**42], "float32")
        assert "ResourceExhausted" in str(own.value)
    tensors = huge(place)
    for _ in range(3 if place == "cpu" else 1):
        with pytest.raises(MemoryError, match="ResourceExhausted"):
            getattr(F, function)(**{name: tensors[name] for name in CALLS[function]})
    inputs = testing.swiglu_weighted_inputs(5, 24)
    testing.assert_swiglu_weighted_bwd(inputs, run_swiglu(inputs, place))
    inputs = testing.rmsnorm_silu_gate_inputs(50)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, run_rmsnorm(inputs, place))


def test_nothing_is_written_where_one_output_finds_no_memory(place):
    tensors = huge(place)
    tensors = {name: tensors[name] for name in CALLS["cake_rmsnorm_silu_gate_train_backward"]}
    grad_weight = tensor_of(np.full(128, 3.5, np.float32), place)
    with pytest.raises(MemoryError):
        F.cake_rmsnorm_silu_gate_train_backward(**tensors, grad_weight=grad_weight)
    np.testing.assert_array_equal(array_of(grad_weight), np.full(128, 3.5, np.float32))
    assert grad_weight.inplace_version == 0


# ---- What a CUDA status is called, with a runtime that is none

HARNESS = r"""
#include <cstdio>
#include "common/cuda_error.h"
extern "C" {
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorName"; }
const char* cudaGetErrorString(cudaError_t) { return "what it means"; }
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 12 : device;
  return cudaSuccess;
}
}
int main() {
  for (const cudaError_t error : {cudaErrorNoKernelImageForDevice, cudaErrorIllegalAddress, cudaErrorInvalidConfiguration}) {
    std::puts(paddle_gated_ops::DescribeCudaError(error, 1, "sm_80, compute_90").c_str());
  }
}
"""


def test_descriptions(tmp_path):
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import toolchain

        folders = toolchain.find_nvcc().include_dirs
    except SystemExit:
        pytest.skip("needs the headers of the CUDA toolkit")
    finally:
        sys.path.pop(0)
    (tmp_path / "harness.cc").write_text(HARNESS)
    command = ["c++", "-std=c++17", f"-I{ROOT / 'ops'}", *(f"-isystem{folder}" for folder in folders)]
    subprocess.run([*command, str(tmp_path / "harness.cc"), "-o", str(tmp_path / "harness")], check=True)
    done = subprocess.run([str(tmp_path / "harness")], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "paddle_gated_ops is built for sm_80, compute_90, but GPU 1 is sm_121: build it with PADDLE_CUDA_ARCH_LIST=12.1 "
        "(cudaErrorName: what it means)",
        "earlier work on GPU 1 has failed, that of another op perhaps (cudaErrorName: what it means)",
        "cudaErrorName: what it means",
    ]


# ---- Launches


def outputs_of(inputs, names, place="gpu:0"):
    like = {"do1": "o1", "probs_grad": "unzipped_probs", "o2_s": "do2_s", "grad_x": "x", "grad_z": "x"}
    like["grad_weight"] = "weight"
    return {name: tensor_of(np.zeros_like(inputs[like[name]]), place) for name in names}


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["fused_swiglu_weighted_bwd_out", "cake_rmsnorm_silu_gate_train_backward"])
def test_a_launch_error_is_raised_at_once_and_names_the_op(cuda, op):
    """A stream whose capture has become invalid refuses every launch."""
    if op == "fused_swiglu_weighted_bwd_out":
        inputs, names = testing.swiglu_weighted_inputs(5, 24), ("do1", "probs_grad", "o2_s")
        options = {}
    else:
        inputs, names = testing.rmsnorm_silu_gate_inputs(50), ("grad_x", "grad_z", "grad_weight")
        options = {"workspace": tensor_of(np.zeros(1 << 16, np.float32), "gpu:0")}
    tensors, outputs = tensors_of(inputs, "gpu:0"), outputs_of(inputs, names)
    expected = run_swiglu(inputs, "gpu:0") if "swiglu" in op else run_rmsnorm(inputs, "gpu:0")
    stream = paddle.device.cuda.Stream()
    cuda.synchronize()
    with paddle.device.cuda.stream_guard(stream):
        cuda.call("cudaStreamBeginCapture", ctypes.c_void_p(stream.cuda_stream), 0)
        assert cuda.runtime.cudaStreamSynchronize(ctypes.c_void_p(stream.cuda_stream)) == 900  # forbidden while capturing
        cuda.runtime.cudaGetLastError()
        with pytest.raises(RuntimeError, match=f"^{op}: cudaErrorStreamCaptureInvalidated"):
            getattr(F, op)(**tensors, **outputs, **options)
        assert cuda.runtime.cudaPeekAtLastError() == 0, "raised once, and left for somebody else to find as well"
        graph = ctypes.c_void_p()
        assert cuda.runtime.cudaStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph)) == 901
        cuda.runtime.cudaGetLastError()
        returned = getattr(F, op)(**tensors, **outputs, **options)
        cuda.synchronize()
    assert_same_bits(named(names, returned), expected)


@pytest.mark.gpu
def test_an_earlier_error_is_neither_cleared_nor_called_ours(cuda):
    swiglu, rmsnorm = testing.swiglu_weighted_inputs(5, 24), testing.rmsnorm_silu_gate_inputs(50)
    tensors = tensors_of(swiglu, "gpu:0"), tensors_of(rmsnorm, "gpu:0")
    pending = cuda.runtime.cudaSetDevice(1000)
    assert pending == 101 and cuda.runtime.cudaPeekAtLastError() == pending
    first = F.fused_swiglu_weighted_bwd(**tensors[0])
    second = F.cake_rmsnorm_silu_gate_train_backward(**tensors[1])
    assert cuda.runtime.cudaPeekAtLastError() == pending
    cuda.runtime.cudaGetLastError()
    cuda.synchronize()
    testing.assert_swiglu_weighted_bwd(swiglu, named(("do1", "probs_grad", "o2_s"), first))
    testing.assert_rmsnorm_silu_gate_bwd(rmsnorm, named(("grad_x", "grad_z", "grad_weight"), second))


FOREIGN_CODE = """
import numpy as np
import paddle
import paddle_gated_ops
import paddle_gated_ops.incubate.nn.functional as F
from calls import tensors_of
from paddle_gated_ops import testing

found = []
for call in (
    lambda: F.fused_swiglu_weighted_bwd(**tensors_of(testing.swiglu_weighted_inputs(5, 24), "gpu:0")),
    lambda: F.cake_rmsnorm_silu_gate_train_backward(**tensors_of(testing.rmsnorm_silu_gate_inputs(5), "gpu:0")),
    paddle_gated_ops.run_check,
):
    try:
        call()
        found.append("no error")
    except RuntimeError as error:
        found.append(str(error))
print(" | ".join(found))
"""


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_a_library_for_another_gpu_says_so(tmp_path):
    """Of another major version: machine code of 8.0 would run on 8.6."""
    major, minor = paddle.device.cuda.get_device_capability(0)
    other = "9.0" if major == 8 else "8.0"
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    env = {**os.environ, "PADDLE_CUDA_ARCH_LIST": other}
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    shutil.copytree(ROOT / "python", tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("_C.*", "__pycache__"))
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", FOREIGN_CODE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    messages = done.stdout.strip().splitlines()[-1].split(" | ")
    names = ["fused_swiglu_weighted_bwd", "cake_rmsnorm_silu_gate_train_backward", "fused_swiglu_weighted_bwd"]
    for name, message in zip(names, messages):
        code = "sm_" + other.replace(".", "")
        pattern = rf"{name}: paddle_gated_ops is built for {code}, but GPU 0 is sm_{major}{minor}: build"
        assert re.match(pattern, message), message
