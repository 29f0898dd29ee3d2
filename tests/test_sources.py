"""The layer rule of the sources, and that they compile without a warning."""
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "ops"
spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
setup_py = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup_py)
toolchain = setup_py.toolchain


def sources(*patterns):
    found = [path for pattern in patterns for path in sorted(OPS.glob(pattern))]
    assert found, patterns
    return found


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)


PADDLE_FREE = [path for path in sources("*/*_math.h", "*/*_cpu.cc", "*/*_cuda.cu", "common/*.*")
               if not path.name.startswith("paddle_glue") and path.suffix != ".md"]


def all_includes(path):
    """{name: the file that includes it}, through the headers of ops/."""
    names, seen, todo = {}, set(), [path]
    while todo:
        current = todo.pop()
        seen.add(current)
        for name in includes(current):
            names.setdefault(name, current)
            found = [folder / name for folder in (current.parent, OPS) if (folder / name).is_file()]
            todo += [p for p in found[:1] if p not in seen]
    return names


@pytest.mark.parametrize("path", PADDLE_FREE, ids=lambda path: path.name)
def test_layer_rule_kernels_never_see_paddle(path):
    for name, includer in all_includes(path).items():
        assert not name.startswith(("paddle/", "pybind11/")) and name != "Python.h", f"{includer} includes {name}"


@pytest.mark.parametrize("path", sources("*/*_op.cc", "module.cc"), ids=lambda path: path.name)
def test_layer_rule_glue_has_no_math(path):
    for name in includes(path):
        assert not name.endswith(("_math.h", "numerics.h")), f"{path} includes {name}"
    assert not re.findall(r"\b(?:exp|exp2|log|sqrt|rsqrt|pow|tanh)f?\(", path.read_text())


@pytest.mark.parametrize("path", [p for p in PADDLE_FREE if p.suffix in (".cc", ".h")], ids=lambda path: path.name)
def test_paddle_free_sources_have_no_warnings_and_headers_stand_alone(path, tmp_path):
    folders = [f"-I{OPS}"]
    if any(name.startswith("cuda") for name in all_includes(path)):
        if not shutil.which("nvcc"):
            pytest.skip("needs the CUDA toolkit's headers")
        folders += [f"-isystem{folder}" for folder in toolchain.find_nvcc().include_dirs]
    unit = tmp_path / "unit.cc"
    unit.write_text(f'#include "{path}"\n')
    done = subprocess.run([*toolchain.find_cxx()[0], *setup_py.CXX_FLAGS, "-Wall", "-Wextra", "-Werror", *folders, "-c",
                           str(unit), "-o", os.devnull], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
