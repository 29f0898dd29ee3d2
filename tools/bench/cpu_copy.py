"""The limit on a CPU: the best copy with as many threads, of the kernels' own pool."""

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import toolchain

ROOT = Path(__file__).resolve().parent.parent.parent


@cache
def _library():
    sources = [str(ROOT / "tools/bench/cpu_copy.cc"), str(ROOT / "ops/common/parallel_for.cc")]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/libcpu_copy.so"
        command = [*toolchain.find_cxx()[0], "-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", f"-I{ROOT}/ops"]
        subprocess.run([*command, *sources, "-o", path], check=True)
        return ctypes.CDLL(path)


def copier(threads, streaming):
    """A function (to, from, bytes) of addresses; streaming stores go past the caches, ``to`` is 16-byte aligned then."""
    copy = _library().Copy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    copy.restype = None
    return lambda to, source, count: copy(source, to, count, threads, streaming)
