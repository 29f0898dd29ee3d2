"""The annotations hold in a user's script, and the documented functions have the documented signatures."""

import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from inspect import Parameter
from pathlib import Path

import pytest

import paddle_gated_ops
import paddle_gated_ops.incubate.nn.functional as F

EMPTY = Parameter.empty
# Of the documentation of paddle.incubate.nn.functional and of FlashInfer: what may be passed by position, with defaults;
# what goes by keyword alone; what comes back.
DOCUMENTED = {
    "fused_swiglu_weighted_bwd": (
        {"o1": EMPTY, "do2_s": EMPTY, "unzipped_probs": EMPTY, "name": None},
        {},
        "tuple[Tensor, Tensor, Tensor]",
    ),
    "cake_rmsnorm_silu_gate_train_backward": (
        {"grad_out": EMPTY, "x": EMPTY, "z": EMPTY, "weight": EMPTY, "eps": 1e-6},
        {
            "grad_x": None,
            "grad_z": None,
            "grad_weight": None,
            "accumulate_grad_weight": False,
            "compute_grad_weight": True,
            "workspace": None,
        },
        "tuple[Tensor, Tensor, Tensor | None]",
    ),
}
ANNOTATIONS = {None: "Tensor | None", EMPTY: "Tensor", 1e-6: "float", False: "bool", True: "bool"}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_signatures_are_the_documented_ones(name):
    positional, by_keyword, returned = DOCUMENTED[name]
    signature = inspect.signature(getattr(F, name))
    expected = [(n, Parameter.POSITIONAL_OR_KEYWORD, default) for n, default in positional.items()]
    expected += [(n, Parameter.KEYWORD_ONLY, default) for n, default in by_keyword.items()]
    assert [(p.name, p.kind, p.default) for p in signature.parameters.values()] == expected
    for p in signature.parameters.values():
        assert p.annotation == ("str | None" if p.name == "name" else ANNOTATIONS[p.default]), p
    assert signature.return_annotation == returned


PUBLIC = [
    getattr(module, name)
    for module in (paddle_gated_ops, F, paddle_gated_ops.testing)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda function: function.__name__)
def test_public_functions_are_annotated(function):
    signature = inspect.signature(function)
    assert signature.return_annotation is not EMPTY
    assert all(p.annotation is not EMPTY for p in signature.parameters.values())


SCRIPT = '''
import numpy as np
import paddle

import paddle_gated_ops
import paddle_gated_ops.incubate.nn.functional as F
from paddle_gated_ops import testing
from paddle_gated_ops.incubate.nn import RMSNormSiLUGate, WeightedSwiGLUExperts

x = paddle.ones([2, 128]).astype("bfloat16")
probs, weight = paddle.ones([2]), paddle.ones([128]).astype("bfloat16")
o2_s: paddle.Tensor = F.fused_swiglu_weighted(x, probs, clamp_value=7.0)
do1, probs_grad, o2_s = F.fused_swiglu_weighted_bwd(x, o2_s, probs)
F.fused_swiglu_weighted_clamp_bwd(x, o2_s, probs, 7.0)
F.fused_swiglu_weighted_bwd_out(x, o2_s, probs, do1=x)
y: paddle.Tensor = F.cake_rmsnorm_silu_gate(x, x, weight, 1e-5)
F.cake_rmsnorm_silu_gate_train_forward(x, x, weight, out=y)
size: int = F.cake_rmsnorm_silu_gate_train_backward_workspace_bytes(2, "cpu")
workspace = paddle.empty([size // 4])
grad_x, grad_z, grad_weight = F.cake_rmsnorm_silu_gate_train_backward(x, x, x, weight, grad_x=x, workspace=workspace)
if grad_weight is not None:
    grad_weight.astype("float32")
norm, experts = RMSNormSiLUGate(), WeightedSwiGLUExperts(2, 64, 32, weight_attr=paddle.ParamAttr())
norm.forward(x, x).astype("float32")
experts.forward(x, probs, [1, 1]), experts.forward(x, probs, np.ones(2, np.int64))
worst: float = paddle_gated_ops.run_check()["cpu"]["do1"]
path: str = paddle_gated_ops.show_config()["CPU path"]
paddle_gated_ops.set_num_threads(paddle_gated_ops.get_num_threads())
with paddle_gated_ops.patch_paddle() as patch:
    patch.restore()
inputs = testing.swiglu_weighted_inputs((2, 3), 8)
bits: np.ndarray = testing.bits_of(testing.bf16_tensor(inputs["o1"], "cpu"))
errors: dict[str, float] = testing.assert_swiglu_weighted_bwd(inputs, {"do1": bits})
'''

MISTAKES = {  # a line, and what mypy says of it
    'F.fused_swiglu_weighted_bwd(x, x, [0.5])': '"list[float]"; expected "Tensor"',
    'F.cake_rmsnorm_silu_gate_train_backward(x, x, x, weight, 1e-6, x)': "Too many positional arguments",
    'F.cake_rmsnorm_silu_gate_train_backward(x, x, x, weight)[2].astype("float32")': 'Item "None"',
    'paddle_gated_ops.set_num_threads("2")': 'expected "int"',
}


def run_mypy(folder, script):
    (folder / "script.py").write_text(script)
    environment, home = dict(os.environ), Path(paddle_gated_ops.__file__).parent.parent
    if home.name != "site-packages":  # there mypy finds it, and wants nobody to name the folder
        environment["MYPYPATH"] = str(home)
    # Errors inside the package are none of the user's: an installed package's are not shown.
    options = ["--strict", "--follow-imports=silent", "--disable-error-code=type-arg"]
    command = [sys.executable, "-m", "mypy", *options, "script.py"]
    return subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, timeout=280).stdout


@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")
def test_mypy_accepts_a_users_script_and_sees_its_mistakes(tmp_path):
    import paddle

    if not (Path(paddle.__file__).parent / "py.typed").is_file():
        pytest.skip("this Paddle has no types")
    assert "Success" in run_mypy(tmp_path, SCRIPT), run_mypy(tmp_path, SCRIPT)
    first = SCRIPT.count("\n") + 1
    found = run_mypy(tmp_path, SCRIPT + "".join(line + "\n" for line in MISTAKES)).splitlines()
    for number, message in enumerate(MISTAKES.values(), first):
        assert [line for line in found if line.startswith(f"script.py:{number}: error") and message in line], found
    assert found[-1].startswith(f"Found {len(MISTAKES)} errors")
