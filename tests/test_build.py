"""The package's promises: what is built and shipped, and how a build fails.

Builds run on stand-in projects: this checkout's setup.py, pyproject.toml and tools/toolchain.py over a module of a few
lines, most of them with a stand-in Paddle, which takes a GPU build and a missing Paddle into reach.
"""
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPS = ROOT / "ops"


def load(path):
    spec = importlib.util.spec_from_file_location(path.name.split(".")[0], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_py = load(ROOT / "setup.py")
toolchain = setup_py.toolchain


# ---- Stand-ins

MODULE_CC = """
#include <Python.h>
#include "tiny/tiny.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__C() {
  PyObject* module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "cpu", CpuValue());
#ifdef PADDLE_GATED_OPS_WITH_CUDA
  PyModule_AddIntConstant(module, "cuda", CudaValue());
#endif
  return module;
}
"""

PADDLE = """
class version:
    full_version, commit = "0.0", "stand-in"
    def cuda():
        return "12.6" if {cuda} else "False"
def is_compiled_with_cuda():
    return {cuda}
def is_compiled_with_rocm():
    return False
"""

PADDLE_EXTENSION = """
import os, sysconfig, setuptools
def CppExtension(sources, include_dirs, extra_compile_args):
    extension = setuptools.Extension("x", sources, include_dirs=[*include_dirs, sysconfig.get_path("include")])
    extension.extra_compile_args = extra_compile_args
    return extension
def CUDAExtension(**arguments):
    assert "PADDLE_CUDA_ARCH_LIST" not in os.environ, "Paddle 3.3 parses it, and rejects some of it"
    print("CUDAExtension sees CUDA_HOME", os.environ["CUDA_HOME"])
    return CppExtension(**arguments)
"""

# Compiles CUDA sources that are plain C++.
NVCC = """#!/bin/sh
case "$*" in
*--list-gpu-code*) echo sm_75 sm_80 sm_90 compute_90;;
*--dryrun*) echo '#$ TOP={home}/bin/..' >&2; echo '#$ INCLUDES="-I{home}/include"' >&2;;
*--version*) echo stand-in;;
*) while [ $# -gt 0 ]; do case $1 in -c) source=$2;; -o) object=$2;; esac; shift; done
   c++ -x c++ -std=c++17 -fPIC -Iops -c $source -o $object;;
esac
"""


def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    ours = ("setup.py", "pyproject.toml", "MANIFEST.in", "tools/toolchain.py", "python/paddle_gated_ops/_version.py")
    for name in ours:
        write(folder / name, (ROOT / name).read_text())
    write(folder / "python/paddle_gated_ops/__init__.py", "")
    write(folder / "README.md", "A stand-in.\n")
    write(folder / "ops/module.cc", MODULE_CC)
    write(folder / "ops/tiny/tiny.h", "constexpr int kValue = 1;\nint CpuValue();\nint CudaValue();\n")
    write(folder / "ops/tiny/tiny_cpu.cc", '#include "tiny/tiny.h"\nint CpuValue() { return kValue; }\n')
    write(folder / "ops/tiny/tiny_cuda.cu", '#include "tiny/tiny.h"\nint CudaValue() { return 10 * kValue; }\n')
    return folder


@pytest.fixture
def cpu_paddle(tmp_path):
    write(tmp_path / "cpu/paddle/__init__.py", PADDLE.format(cuda=False))
    write(tmp_path / "cpu/paddle/utils/cpp_extension.py", PADDLE_EXTENSION)
    return {"PYTHONPATH": str(tmp_path / "cpu")}


@pytest.fixture
def gpu_paddle(tmp_path):
    write(tmp_path / "gpu/paddle/__init__.py", PADDLE.format(cuda=True))
    write(tmp_path / "gpu/paddle/utils/cpp_extension.py", PADDLE_EXTENSION)
    return {"PYTHONPATH": str(tmp_path / "gpu")}


@pytest.fixture
def no_paddle(tmp_path):
    write(tmp_path / "none/paddle.py", "raise ModuleNotFoundError(\"No module named 'paddle'\")\n")
    return {"PYTHONPATH": str(tmp_path / "none")}


def python(folder, *arguments, **variables):
    settings = ("CXX", "CXXFLAGS", "LDFLAGS", "CUDA_HOME", "CUDA_PATH", "PADDLE_CUDA_ARCH_LIST", "MAX_JOBS")
    env = {name: value for name, value in os.environ.items() if name not in settings}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env={**env, **variables}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=280)


def build_wheel(folder, **variables):
    """(pip's result, the wheel if there is one)"""
    shutil.rmtree(folder / "dist", ignore_errors=True)
    options = ("-v", "--no-build-isolation", "--no-deps", "--no-index", "-w", "dist")
    done = python(folder, "-m", "pip", "wheel", *options, ".", **variables)
    wheels = list(folder.glob("dist/*.whl"))
    assert (done.returncode == 0) == (len(wheels) == 1), done.stdout
    return done, wheels[0] if wheels else None


def build_editable(folder, **variables):
    hook = "from setuptools import build_meta; build_meta.build_editable('.')"
    return python(folder, "-c", hook, **variables)


def names_of(wheel):
    return sorted(zipfile.ZipFile(wheel).namelist())


def library_of(wheel):
    """The library in a wheel that was built with a stand-in Paddle, loaded."""
    folder = wheel.parent.parent / f"unpacked-{wheel.stat().st_mtime_ns}"
    zipfile.ZipFile(wheel).extractall(folder)
    library, = folder.glob("paddle_gated_ops/_C.*.so")
    return load(library)


def assert_fails_with(done, *words):
    """One sentence that holds the words, and no traceback."""
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stdout, done.stdout
    sentences = [line for line in done.stdout.splitlines() if line.strip().startswith("error: ")]
    assert any(all(word in sentence for word in words) for sentence in sentences), done.stdout


# ---- A build that works

CONTENTS = """
__init__.py _amp.py _autograd.py _checks.py _dist.py _graph.py _grouped.py _library.py _patch.py _place.py _run_check.py
_show_config.py _threads.py _version.py py.typed
incubate/__init__.py incubate/nn/__init__.py
incubate/nn/functional/__init__.py incubate/nn/functional/rmsnorm_silu_gate.py incubate/nn/functional/swiglu_weighted.py
incubate/nn/layer/__init__.py incubate/nn/layer/_weight_attr.py incubate/nn/layer/rmsnorm_silu_gate.py
incubate/nn/layer/weighted_swiglu_experts.py
testing/__init__.py testing/bf16.py testing/fp32_range.py testing/inputs.py testing/reference.py testing/tolerance.py
""".split()
VERSION = setup_py.VERSION_PY["__version__"]


def test_the_wheels_contents_are_a_fixed_list(project):
    shutil.rmtree(project / "python")
    ignored = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "python", project / "python", ignore=ignored)
    write(project / "tests/test_x.py", "")
    write(project / "LICENSE", "")
    done, wheel = build_wheel(project)  # with the real Paddle
    assert wheel, done.stdout
    assert any(name.endswith("/LICENSE") for name in names_of(wheel))
    names = [name for name in names_of(wheel) if ".dist-info/" not in name]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built = ["_C" + suffix, "_C" + suffix.replace(".so", ".json")]
    assert names == sorted(f"paddle_gated_ops/{name}" for name in CONTENTS + built)
    # The sources for a GPU are not built for a CPU build of Paddle.
    import paddle

    tag = setup_py.VERSION_PY["paddle_tag"](paddle)
    assert wheel.name.startswith(f"paddle_gated_ops-{VERSION}+{tag}-cp")
    assert ("tiny_cuda" in done.stdout) == paddle.is_compiled_with_cuda()


def test_a_removed_module_is_not_shipped_from_the_old_build_folder(project, cpu_paddle):
    extra = write(project / "python/paddle_gated_ops/extra.py", "")
    assert "paddle_gated_ops/extra.py" in names_of(build_wheel(project, **cpu_paddle)[1])
    extra.unlink()
    assert "paddle_gated_ops/extra.py" not in names_of(build_wheel(project, **cpu_paddle)[1])


def test_sdist_needs_no_paddle_and_builds(project, cpu_paddle, no_paddle, tmp_path):
    write(project / "ops/tiny/README.md", "math")
    write(project / "ops/tiny/tiny.cuh", "")
    done = python(project, "-c", "from setuptools import build_meta; build_meta.build_sdist('dist')", **no_paddle)
    assert done.returncode == 0, done.stdout
    archive, = project.glob("dist/*.tar.gz")
    assert archive.name.endswith(f"-{VERSION}.tar.gz")  # setuptools 65 writes dashes in the name
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "sdist")
    unpacked, = (tmp_path / "sdist").iterdir()
    for path in project.glob("ops/**/*.*"):
        assert (unpacked / path.relative_to(project)).is_file()
    done, wheel = build_wheel(unpacked, **cpu_paddle)
    assert wheel, done.stdout
    assert wheel.name.startswith(f"paddle_gated_ops-{VERSION}+paddle0.0.cpu-cp")
    assert library_of(wheel).cpu == 1


def test_an_editable_build_tells_its_paddle(project, cpu_paddle):
    done = build_editable(project, **cpu_paddle)
    assert f"paddle_gated_ops-{VERSION}+paddle0.0.cpu-" in "".join(p.name for p in project.glob("*.whl")), done.stdout
    info, = project.glob("python/paddle_gated_ops/_C.*.json")
    assert json.loads(info.read_text())["paddle_tag"] == "paddle0.0.cpu"
    assert info.with_suffix(".so").is_file()


@pytest.mark.parametrize("release, cuda, tag", [
    ("3.3.1", None, "paddle3.3.cpu"), ("2.6.2", "12.0", "paddle2.6.cu12"), ("3.10.0rc1", "11.8", "paddle3.10.cu11"),
    ("0.0.0", "13.0", "paddle0.0.cu13"),
])
def test_paddle_tag(release, cuda, tag):
    version = SimpleNamespace(full_version=release, cuda=lambda: str(cuda or False))
    paddle = SimpleNamespace(version=version, is_compiled_with_cuda=lambda: cuda is not None)
    assert setup_py.VERSION_PY["paddle_tag"](paddle) == tag


def test_a_changed_header_rebuilds_and_nothing_else_does(project, cpu_paddle):
    done, wheel = build_wheel(project, **cpu_paddle)
    assert library_of(wheel).cpu == 1 and "-c ops/tiny/tiny_cpu.cc" in done.stdout
    done, wheel = build_wheel(project, **cpu_paddle)
    assert library_of(wheel).cpu == 1 and " -c ops/" not in done.stdout
    header = project / "ops/tiny/tiny.h"
    times = header.stat()
    header.write_text(header.read_text().replace("= 1", "= 2"))
    os.utime(header, ns=(times.st_atime_ns, times.st_mtime_ns))  # as after a checkout that keeps times
    assert library_of(build_wheel(project, **cpu_paddle)[1]).cpu == 2
    done, wheel = build_wheel(project, CXXFLAGS="-DUNUSED", **cpu_paddle)
    assert wheel and "-c ops/tiny/tiny_cpu.cc" in done.stdout


def test_every_included_header_is_a_dependency():
    included = set()
    for path in OPS.rglob("*"):
        if path.suffix in (".h", ".cuh", ".cc", ".cu"):
            for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M):
                candidates = [folder / name for folder in (path.parent, OPS)]
                included.update(c.resolve().relative_to(ROOT).as_posix() for c in candidates if c.is_file())
    assert len(included) > 5
    assert included <= set(setup_py.HEADERS)


def test_an_isolated_build_takes_the_installed_paddle():
    import paddle

    if "PYTHONPATH" in os.environ:
        pytest.skip("Paddle may come from PYTHONPATH, which an isolated build does not see")
    isolate = "import sys; sys.path = ['tools'] + [p for p in sys.path if 'site-packages' not in p]; "
    done = python(ROOT, "-c", isolate + "import toolchain; print(toolchain.import_paddle().version.full_version)")
    assert done.stdout.splitlines()[-1] == paddle.version.full_version, done.stdout


def test_a_build_finds_the_paddle_of_the_activated_environment(tmp_path):
    """As `python -m build` has it, whose isolated environment is not a child of ours."""
    folder = tmp_path / f"activated/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    write(folder / "paddle/__init__.py", PADDLE.format(cuda=False).replace("0.0", "3.9.9"))
    code = "import site, sys; sys.path = ['tools'] + [p for p in sys.path if 'site-packages' not in p]; " \
           "find = site.getsitepackages; site.getsitepackages = lambda *prefixes: find(*prefixes) if prefixes else []; " \
           "import toolchain; print(toolchain.import_paddle().version.full_version)"
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        others = {"VIRTUAL_ENV": "", "CONDA_PREFIX": "", "PYTHONPATH": ""}
        done = python(ROOT, "-c", code, **{**others, name: str(tmp_path / "activated")})
        assert done.stdout.splitlines()[-1] == "3.9.9", done.stdout


def test_flags_keep_the_numbers():
    assert {"-fno-fast-math", "-ffp-contract=off", "-std=c++17"} <= set(setup_py.CXX_FLAGS)
    assert {"-fmad=false", "-std=c++17"} <= set(setup_py.NVCC_FLAGS)
    assert "fast" not in " ".join(setup_py.CXX_FLAGS[1:] + setup_py.NVCC_FLAGS)


# ---- Builds that fail

def test_a_compile_error_fails_the_build_and_names_the_file(project):
    done, wheel = build_wheel(project)  # with the real Paddle, and leaves a library in the build folder
    assert wheel, done.stdout
    assert list(project.glob("build/lib*/paddle_gated_ops/_C.*.so"))
    source = project / "ops/tiny/tiny_cpu.cc"
    source.write_text(source.read_text() + "int Broken( {\n")
    done, wheel = build_wheel(project)
    assert wheel is None
    assert_fails_with(done, "ops/tiny/tiny_cpu.cc")
    assert_fails_with(build_editable(project), "ops/tiny/tiny_cpu.cc")
    assert not list(project.glob("python/paddle_gated_ops/*.so"))


def test_a_link_error_fails_the_build(project, cpu_paddle):
    done, wheel = build_wheel(project, LDFLAGS="-lno_such_library", **cpu_paddle)
    assert wheel is None
    assert_fails_with(done, "linking")


def test_no_paddle_fails_with_one_sentence(project, no_paddle):
    done, wheel = build_wheel(project, **no_paddle)
    assert wheel is None
    assert_fails_with(done, "Paddle", "No module named 'paddle'", sys.executable)
    assert_fails_with(build_editable(project, **no_paddle), "Paddle", "No module named 'paddle'")


def test_an_old_paddle_fails_with_one_sentence(project, cpu_paddle, tmp_path):
    package = tmp_path / "cpu/paddle/__init__.py"
    package.write_text(package.read_text().replace('"0.0"', '"2.5.2"'))
    done, wheel = build_wheel(project, **cpu_paddle)
    assert wheel is None
    assert_fails_with(done, "Paddle 2.5.2", "2.6 or newer")


@pytest.mark.parametrize("macros, found", [("#define __GNUC__ 7", "g++ 7"),
                                           ("#define __GNUC__ 4\n#define __clang_major__ 6", "clang 6")])
def test_an_old_compiler_fails_with_one_sentence(project, cpu_paddle, tmp_path, macros, found):
    compiler = write(tmp_path / "old-c++", f"#!/bin/sh\ncat <<'END'\n{macros}\nEND\n", 0o755)
    done, wheel = build_wheel(project, CXX=str(compiler), **cpu_paddle)
    assert wheel is None
    assert_fails_with(done, found, "C++17", "g++ 8", "clang 7", str(compiler))


def test_a_missing_compiler_fails_with_one_sentence(project, cpu_paddle):
    done, wheel = build_wheel(project, CXX="no-such-compiler -O2", **cpu_paddle)
    assert wheel is None
    assert_fails_with(done, "no-such-compiler")
    done, wheel = build_wheel(project, PATH="", **cpu_paddle)
    assert wheel is None
    assert_fails_with(done, "No C++ compiler on PATH")


@pytest.mark.parametrize("macro, minimum", [("__GNUC__", 8), ("__clang_major__", 7)])
def test_the_oldest_good_compiler_passes(tmp_path, monkeypatch, macro, minimum):
    compiler = write(tmp_path / "c++", f"#!/bin/sh\necho '#define {macro} {minimum}'\n", 0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert toolchain.find_cxx()[0] == [str(compiler)]


def test_the_shared_cxx_library_is_linked(tmp_path):
    with_shared = write(tmp_path / "c++", "#!/bin/sh\necho /usr/lib/libstdc++.so\n", 0o755)
    static_alone = write(tmp_path / "g++", "#!/bin/sh\necho libstdc++.so\n", 0o755)
    assert toolchain.libstdcxx_flag([str(with_shared)]) == "-lstdc++"
    assert toolchain.libstdcxx_flag([str(static_alone)]) == "-l:libstdc++.so.6"


# ---- A GPU build of Paddle

def test_gpu_paddle_without_nvcc_fails_with_one_sentence(project, gpu_paddle, tmp_path):
    only_cxx = tmp_path / "bin"
    only_cxx.mkdir()
    (only_cxx / "c++").symlink_to(shutil.which("c++"))
    done, wheel = build_wheel(project, PATH=str(only_cxx), **gpu_paddle)
    assert wheel is None
    assert_fails_with(done, "GPU build", "nvcc", "PATH")
    done, wheel = build_wheel(project, CUDA_HOME=str(tmp_path), **gpu_paddle)
    assert wheel is None
    assert_fails_with(done, "GPU build", "nvcc", f"{tmp_path}/bin")


def test_too_old_an_nvcc_fails_with_one_sentence(project, gpu_paddle, tmp_path):
    write(tmp_path / "bin/nvcc", NVCC.replace("sm_90 compute_90", "sm_86 sm_87"), 0o755)
    done, wheel = build_wheel(project, CUDA_HOME=str(tmp_path), PADDLE_CUDA_ARCH_LIST="8.0", **gpu_paddle)
    assert wheel is None
    assert_fails_with(done, f"{tmp_path}/bin/nvcc", "CUDA 11.8 or newer")


@pytest.mark.parametrize("through", ["CUDA_HOME", "PATH"])
def test_gpu_paddle_builds_both_kinds_of_sources(project, gpu_paddle, tmp_path, through):
    home = tmp_path / "cuda"
    nvcc = write(home / "bin/nvcc", NVCC.replace("{home}", str(home)), 0o755)
    if through == "CUDA_HOME":
        variables = {"CUDA_HOME": str(home)}
    else:  # by way of a script elsewhere, as some installations have it
        write(tmp_path / "bin/nvcc", f'#!/bin/sh\nexec {nvcc} "$@"\n', 0o755)
        variables = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done, wheel = build_wheel(project, PADDLE_CUDA_ARCH_LIST="9.0a;8.0+PTX", **gpu_paddle, **variables)
    assert wheel, done.stdout
    library = library_of(wheel)
    assert (library.cpu, library.cuda) == (1, 10)
    assert wheel.name.startswith(f"paddle_gated_ops-{VERSION}+paddle0.0.cu12-cp")
    info = json.loads(Path(library.__file__).with_suffix(".json").read_text())
    assert (info["paddle_tag"], info["gpu_code"]) == ("paddle0.0.cu12", ["sm_90a", "sm_80", "compute_80"])
    assert f"CUDAExtension sees CUDA_HOME {home}\n" in done.stdout.replace("\r", "")
    command = next(line for line in done.stdout.splitlines() if "-c ops/tiny/tiny_cuda.cu" in line)
    assert codes_of(command.split()) == ["sm_90a", "sm_80", "compute_80"]
    for line in done.stdout.splitlines():
        if " -c ops/" in line:
            assert "-DPADDLE_GATED_OPS_WITH_CUDA" in line and "-DPADDLE_WITH_CUDA" in line
    done, wheel = build_wheel(project, PADDLE_CUDA_ARCH_LIST="Hopper", **gpu_paddle, **variables)
    assert wheel is None
    assert_fails_with(done, "PADDLE_CUDA_ARCH_LIST", "'Hopper'")


def codes_of(words):
    return [word.split(",code=")[1] for word in words if word.startswith("-gencode=")]


CODES = {f"sm_{n}" for n in (75, 80, 86, 89, 90, 100, 120)} | {"compute_90"}


@pytest.mark.parametrize("arch_list, expected", [
    ("", ["sm_80", "sm_90", "sm_100", "compute_100"]),
    (" ; ", ["sm_80", "sm_90", "sm_100", "compute_100"]),
    ("8.0 9.0", ["sm_80", "sm_90"]),
    ("8.0;9.0+PTX", ["sm_80", "sm_90", "compute_90"]),
    ("9.0a", ["sm_90a"]),
    ("9.0a+PTX", ["sm_90a", "compute_90a"]),
    ("9.0+ptx, 8.6", ["sm_90", "compute_90", "sm_86"]),
    ("80 90", ["sm_80", "sm_90"]),
    ("100f,12.0", ["sm_100f", "sm_120"]),
    ("9.0 9.0;90", ["sm_90"]),
    ("08.0", ["sm_80"]),
])
def test_arch_list(arch_list, expected):
    flags = toolchain.gencode_flags(arch_list, CODES)
    assert codes_of(flags) == expected
    for flag, code in zip(flags, expected):
        assert flag == f"-gencode=arch=compute_{code.split('_')[1]},code={code}"


def test_default_archs_follow_nvcc():
    flags = toolchain.gencode_flags("", {"sm_70", "sm_80", "sm_90"})
    assert codes_of(flags) == ["sm_80", "sm_90", "compute_90"]
    flags = toolchain.gencode_flags("", {"sm_90", "sm_120"})
    assert codes_of(flags) == ["sm_90", "compute_90"]
    with pytest.raises(SystemExit, match="PADDLE_CUDA_ARCH_LIST"):
        toolchain.gencode_flags("", {"sm_110", "sm_120"})


@pytest.mark.parametrize("arch_list, words", [
    ("Hopper", ["'Hopper'", "9.0+PTX"]),
    ("8.0 sm_90", ["'sm_90'"]),
    ("9", ["'9'"]),
    ("9.0b", ["'9.0b'"]),
    ("9.0+PTXX", ["'9.0+PTXX'"]),
    ("7.5", ["'7.5'", "8.0 or newer"]),
    ("8.0 9.9", ["'9.9'", "9.0, 10.0, 12.0"]),
    ("8.0a", ["'8.0a'", "9.0a"]),
    ("9.0f", ["'9.0f'", "10.0f"]),
])
def test_bad_arch_list_is_one_sentence(arch_list, words):
    with pytest.raises(SystemExit) as caught:
        toolchain.gencode_flags(arch_list, CODES)
    message = str(caught.value)
    assert message.startswith("error: PADDLE_CUDA_ARCH_LIST") and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("jobs", ["abc", "0", "-1", "1.5", "99999"])
def test_bad_max_jobs_is_one_sentence(monkeypatch, jobs):
    monkeypatch.setenv("MAX_JOBS", jobs)
    with pytest.raises(SystemExit, match="^error: MAX_JOBS must be a number .*'" + re.escape(jobs)):
        toolchain.max_jobs()


def test_blank_cxx_is_none(monkeypatch):
    monkeypatch.setenv("CXX", " ")
    assert toolchain.find_cxx()[0]


def test_host_compiler_of_nvcc():
    assert toolchain.host_compiler(["/usr/bin/ccache", "g++-12", "-isystem", "/x"]) == "g++-12"


def test_fast_math_is_switched_off(tmp_path, monkeypatch):
    """CXXFLAGS come before our flags, and nvcc's own variables do not reach it."""
    source = tmp_path / "fast_math.cc"
    source.write_text("#ifdef __FAST_MATH__\n#error fast-math is on\n#endif\n")
    done = toolchain.run([*toolchain.find_cxx()[0], "-ffast-math", *setup_py.CXX_FLAGS, "-fsyntax-only", str(source)])
    assert done.returncode == 0, done.stdout
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    assert "NVCC_APPEND" not in toolchain.run(["env"]).stdout


SUBNORMAL = """
import sys
sys.path.insert(0, "unpacked/paddle_gated_ops")
before = sys.float_info.min / 2
import _C
assert before > 0 and sys.float_info.min / 2 == before
"""


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_fast_math_is_not_linked(project, cpu_paddle, tmp_path, flag):
    """gcc's crtfastmath.o would switch subnormal numbers off in whatever process loads the library."""
    command = shlex.join([*toolchain.find_cxx()[0], flag])
    done, wheel = build_wheel(project, CXX=command, LDFLAGS=flag, CXXFLAGS=flag, **cpu_paddle)
    assert wheel, done.stdout
    zipfile.ZipFile(wheel).extractall(project / "unpacked")
    done = python(project, "-c", SUBNORMAL)
    assert done.returncode == 0, done.stdout


# ---- The installed package

def test_missing_library_is_an_import_error_that_names_it(tmp_path):
    package = tmp_path / "paddle_gated_ops"
    shutil.copytree(ROOT / "python/paddle_gated_ops", package, ignore=shutil.ignore_patterns("*.so"))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = python(tmp_path, "-c", "import paddle_gated_ops", PYTHONPATH=path)
    assert done.returncode != 0
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("ImportError: ") and f"{package}/_C." in last, done.stdout


@pytest.mark.parametrize("other", ["paddle1.8.cpu", "paddle3.3.cu12"])
def test_a_library_for_another_paddle_is_an_import_error_before_it_is_loaded(tmp_path, other):
    import paddle_gated_ops

    package = tmp_path / "paddle_gated_ops"
    shutil.copytree(Path(paddle_gated_ops.__file__).parent, package)
    library = package / ("_C" + sysconfig.get_config_var("EXT_SUFFIX"))
    library.write_text("no library")
    info = library.with_suffix(".json")
    info.write_text(json.dumps({**json.loads(info.read_text()), "paddle_tag": other, "paddle": "9.9.9"}))
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    done = python(tmp_path, "-c", "import paddle_gated_ops", PYTHONPATH=path)
    assert done.returncode != 0
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: paddle_gated_ops is built for Paddle 9.9.9 ({other})"), done.stdout
    assert "pip install --force-reinstall" in last


# ---- tools/env.sh

@pytest.mark.parametrize("found, words", [
    ("", ["no python3 at all"]),
    ("is Python 3.14.0", ["python3 is Python 3.14.0", "3.9 to 3.13"]),
])
def test_no_python_with_a_wheel_is_one_sentence(tmp_path, found, words):
    write(tmp_path / "tools/env.sh", (ROOT / "tools/env.sh").read_text())
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    if found:  # it answers as a Python 3.14 without Paddle would
        write(tools / "python3", f"#!/bin/sh\n[ $# = 2 ] && [ -d \"$2\" ] && exit 1\necho '{found}'\n", 0o755)
    done = subprocess.run(["bash", "tools/env.sh"], cwd=tmp_path, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={"PATH": str(tools)})
    assert done.returncode == 1
    assert done.stdout.startswith("error: ") and len(done.stdout.splitlines()) == 1, done.stdout
    assert all(word in done.stdout for word in words), done.stdout
