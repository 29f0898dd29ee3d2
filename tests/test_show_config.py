"""show_config says what runs; importing the package leaves the arithmetic of the process as it was."""

import numpy as np
import paddle
import pytest

import paddle_gated_ops
from calls import run_python

LEVELS = ["baseline", "avx2", "avx512", "avx512_bf16"]


def test_it_prints_what_it_returns(capsys):
    config = paddle_gated_ops.show_config()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(None, 1)[0] for line in printed] == [name.split()[0] for name in config]
    assert all(line.endswith(value) for line, value in zip(printed, config.values()))
    assert paddle_gated_ops.__version__ in config["paddle_gated_ops"]
    assert paddle.version.full_version in config["Paddle"] and paddle.version.commit in config["Paddle"]
    assert np.__version__ in config["Python"]
    assert config["CPU threads"] == str(paddle_gated_ops.get_num_threads())
    assert ("sm_" in config["GPU code"] or "compute_" in config["GPU code"]) == paddle.is_compiled_with_cuda()


@pytest.mark.gpu
def test_gpus():
    gpus = paddle_gated_ops.show_config()["GPUs"].split(", ")
    assert [gpu.split()[0] for gpu in gpus] == [f"gpu:{i}" for i in range(paddle.device.cuda.device_count())]


CPU_PATH = "import paddle_gated_ops; path = paddle_gated_ops.show_config()['CPU path']; print(path.split(',')[0])"


@pytest.mark.parametrize("wanted", LEVELS)
def test_the_environment_lowers_the_cpu_path(wanted):
    best = run_python(CPU_PATH, GATED_OPS_CPU_ISA=None)
    assert best in LEVELS
    assert run_python(CPU_PATH, GATED_OPS_CPU_ISA=wanted) == min(best, wanted, key=LEVELS.index)


SUBNORMALS = """
import numpy as np, paddle
def mode():
    tiny = np.float32(1e-40), np.float64(1e-310)
    return [float(value * one) for value, one in zip(tiny, (np.float32(1), np.float64(1)))]
before = mode()
import paddle_gated_ops
paddle_gated_ops.run_check()
assert all(before) and mode() == before, (before, mode())
print("kept")
"""


def test_importing_and_calling_keep_subnormal_numbers():
    assert run_python(SUBNORMALS) == "kept"
