"""Graph export: a model that holds the forwards is saved, and runs in a fresh process that imports paddle_gated_ops.

By jit.load, by an Executor and by paddle.inference, with the bits of the model that was saved.
"""

import os

import paddle
import pytest

from calls import run_python

PADDLE_3 = int(paddle.__version__.split(".")[0]) >= 3

ROWS = (5, 300)

# A process of its own, which knows nothing of the model's code.
CHECK = """
import os
import numpy as np
import paddle
import paddle_gated_ops
path = {path!r}
paddle.set_device("cpu")

def saved(rows):
    arrays = dict(np.load(f"{{path}}.{{rows}}.npz"))
    return arrays, arrays.pop("y")

def check(run):
    for rows in (5, 300):
        arrays, expected = saved(rows)
        assert np.isfinite(expected).all() and expected.std() > 0.1
        np.testing.assert_array_equal(run(arrays), expected)
    print("ok")
"""

JIT_LOAD = CHECK + """
model = paddle.jit.load(path)
check(lambda arrays: model(*(paddle.to_tensor(arrays[name]) for name in ("o1", "probs", "z"))).numpy())
"""

TRAIN_AGAIN = CHECK + """
model = paddle.jit.load(path)
model.train()
optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
losses = []
for _ in range(5):
    loss = model(*(paddle.to_tensor(saved(5)[0][name]) for name in ("o1", "probs", "z"))).square().mean()
    loss.backward()
    assert all(p.grad is not None and np.abs(p.grad.numpy()).max() > 0 for p in model.parameters())
    optimizer.step()
    optimizer.clear_grad()
    losses.append(float(loss))
assert losses[-1] < losses[0], losses
print("ok")
"""

EXECUTOR = CHECK + """
paddle.enable_static()
executor = paddle.static.Executor(paddle.CPUPlace())
program, feeds, fetches = paddle.static.load_inference_model(path, executor)
check(lambda arrays: executor.run(program, feed={{n: arrays[n] for n in feeds}}, fetch_list=fetches)[0])
"""

INFERENCE = CHECK + """
from paddle.inference import Config, create_predictor
model = path + (".json" if os.path.exists(path + ".json") else ".pdmodel")
config = Config(model, path + ".pdiparams")
config.disable_gpu()
{options}
predictor = create_predictor(config)

def run(arrays):
    for name in predictor.get_input_names():
        predictor.get_input_handle(name).copy_from_cpu(arrays[name])
    predictor.run()
    return predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu()

check(run)
"""

FORMATS = {"default": {}, "legacy": {"FLAGS_enable_pir_api": "0"}} if PADDLE_3 else {"default": {}}


@pytest.fixture(scope="module", params=FORMATS)
def saved(request, tmp_path_factory):
    """The path of a saved model, in each format that this Paddle writes, and the environment to read it in."""
    path, environment = str(tmp_path_factory.mktemp("model") / "model"), FORMATS[request.param]
    run_python(f"from export_model import save; save({path!r}, {ROWS})", **environment)
    suffix = ".json" if PADDLE_3 and request.param == "default" else ".pdmodel"
    assert os.path.exists(path + suffix) and os.path.exists(path + ".pdiparams")
    return path, environment


def test_jit_load(saved):
    path, environment = saved
    assert run_python(JIT_LOAD.format(path=path), **environment) == "ok"


def test_jit_load_and_train_again(saved):
    path, environment = saved
    if not os.path.exists(path + ".json"):
        pytest.skip("in the legacy IR Paddle gives the parameters of a loaded model no gradients, whatever its ops")
    assert run_python(TRAIN_AGAIN.format(path=path), **environment) == "ok"


def test_executor(saved):
    path, environment = saved
    assert run_python(EXECUTOR.format(path=path), **environment) == "ok"


@pytest.mark.parametrize("options", [
    "",
    "config.switch_ir_optim(False)",
    "config.set_cpu_math_library_num_threads(2)",
], ids=["as it is", "not optimized", "two threads"])
def test_inference(saved, options):
    path, environment = saved
    assert run_python(INFERENCE.format(path=path, options=options), **environment) == "ok"


def test_without_the_import(saved):
    path, environment = saved
    code = JIT_LOAD.format(path=path).replace("import paddle_gated_ops\n", "")
    # The legacy IR names the op; PIR says no more than that an op has no kernel.
    with pytest.raises(AssertionError, match=r"gated_fused_swiglu_weighted|op \[\] kernel output args"):
        run_python(code, **environment)
