"""What a bug report needs to say."""

from __future__ import annotations

import os
import platform

import numpy as np
import paddle

from ._library import C, build_info
from ._threads import get_num_threads
from ._version import __version__


def show_config() -> dict[str, str]:
    """Prints versions, builds and compute targets, for bug reports.

    The CPU path is the best vector unit of the machine that there is code for, 'avx512_bf16', 'avx512', 'avx2' or
    'baseline'; the environment variable GATED_OPS_CPU_ISA=avx512, =avx2 or =baseline lowers it. The results are the same
    bits on each but 'baseline', which has no fused multiply-add unless the compiler was told of it; all are within the same
    bounds.

    Returns:
        dict[str, str]: what is printed, a line an entry.
    """
    built = build_info()
    cuda = f"CUDA {paddle.version.cuda()}, cuDNN {paddle.version.cudnn()}" if paddle.is_compiled_with_cuda() else "CPU build"
    compilers = f"{built['cxx']}, nvcc {built['nvcc']}" if built["nvcc"] else built["cxx"]
    config = {
        "paddle_gated_ops": f"{__version__}, built for Paddle {built['paddle']} ({built['paddle_tag']}) with {compilers}",
        "Paddle": f"{paddle.version.full_version}, commit {paddle.version.commit}, {cuda}",
        "Python": f"{platform.python_version()}, NumPy {np.__version__}",
        "system": f"{platform.platform()}, {os.cpu_count()} CPU(s)",
        "CPU path": f"{C.cpu_path()}, GATED_OPS_CPU_ISA={os.environ.get('GATED_OPS_CPU_ISA', '')}",
        "CPU threads": str(get_num_threads()),
        "GPU code": " ".join(built["gpu_code"]) or "none: built for a CPU build of Paddle",
        "GPUs": ", ".join(_gpus()) or "none",
    }
    for name, value in config.items():
        print(f"{name:<17} {value}")
    return config


def _gpus():
    for i in range(paddle.device.cuda.device_count() if C.with_cuda else 0):
        properties = paddle.device.cuda.get_device_properties(i)
        yield f"gpu:{i} {properties.name} ({properties.major}.{properties.minor})"
