"""Builds paddle_gated_ops._C, one shared library: the registered ops and their eager entries. Metadata: pyproject.toml.

C++ only for a CPU build of Paddle, C++ and CUDA for a GPU build (no GPU needed). Environment variables:
    CXX, CXXFLAGS, LDFLAGS, MAX_JOBS   as usual
    CUDA_HOME                          the CUDA toolkit, else that of the nvcc on PATH
    PADDLE_CUDA_ARCH_LIST              GPU architectures, "8.0 9.0+PTX"; tools/toolchain.py has the default
"""
import hashlib
import json
import os
import re
import runpy
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))
import toolchain  # noqa: E402

VERSION_PY = runpy.run_path(str(ROOT / "python/paddle_gated_ops/_version.py"))


def files(*patterns):
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


CXX_SOURCES = files("ops/module.cc", "ops/common/*.cc", "ops/*/*_op.cc", "ops/*/*_cpu.cc")
CUDA_SOURCES = files("ops/*/*_cuda.cu")
HEADERS = files("ops/**/*.h", "ops/**/*.cuh")

# One formula gives the same bits in each loop it is inlined into: nothing becomes FMA but what asks for it (MulAdd in
# ops/common/numerics.h), and there is nothing of fast-math, whatever CXXFLAGS asks for.
CXX_FLAGS = ["-fno-fast-math", "-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# Fast-math at link time, from LDFLAGS or CXX, would add start-up code that rounds subnormals to zero in the whole process.
NO_FAST_MATH_AT_LINK = ["-O3", "-fno-fast-math", "-fno-unsafe-math-optimizations"]
NVCC_FLAGS = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-fmad=false"]


class BuildExtension(build_ext):
    """Compiles with Paddle's flags, in commands of our own.

    paddle.utils.cpp_extension.BuildExtension prints a compile error and goes on, shipping the library of an earlier
    build; it also leaves objects and a stub module in the wheel. From Paddle come CppExtension and CUDAExtension: the
    folders, macros and link flags.
    """

    def build_extension(self, ext):
        cxx, cxx_version = toolchain.find_cxx()
        # Paddle's own parser of this variable rejects some of what ours accepts: it must not see it.
        arch_list = os.environ.pop("PADDLE_CUDA_ARCH_LIST", "")
        paddle = toolchain.import_paddle()
        nvcc = toolchain.find_nvcc() if paddle.is_compiled_with_cuda() else None
        if nvcc:
            gencode = toolchain.gencode_flags(arch_list, nvcc.codes)
            os.environ["CUDA_HOME"] = nvcc.home  # where paddle.utils.cpp_extension looks
            from paddle.utils.cpp_extension import CUDAExtension as PaddleExtension
        else:
            from paddle.utils.cpp_extension import CppExtension as PaddleExtension
        # In 2.6 the flags must be a dict for Paddle to add its own.
        flags = PaddleExtension(sources=ext.sources, include_dirs=["ops"], extra_compile_args={"cxx": [], "nvcc": []})

        # Other people's headers do not warn. For the system's own folders -isystem would upset gcc's order of them.
        own = ("ops", "/usr/include", "/usr/local/include")
        include_dirs = [("-I" if folder in own else "-isystem") + folder
                        for folder in flags.include_dirs + (nvcc.include_dirs if nvcc else [])]
        macros = ["-DPADDLE_GATED_OPS_WITH_CUDA", "-DPADDLE_WITH_CUDA"] if nvcc else []
        gpu_code = [flag.split(",code=")[1] for flag in gencode] if nvcc else []
        env_flags = shlex.split(os.environ.get("CXXFLAGS", ""))  # before ours, which decide the numbers
        paddle_flags = [flag for flag in flags.extra_compile_args["cxx"] if flag != "-w"]
        compile_cxx = [*cxx, *env_flags, *paddle_flags, "-D_GLIBCXX_USE_CXX11_ABI=1", *macros,
                       *CXX_FLAGS, *include_dirs]
        if nvcc:  # for messages
            compile_cxx.append(f'-DPADDLE_GATED_OPS_GPU_CODE="{", ".join(gpu_code)}"')
        commands = {source: [*compile_cxx, "-c", source] for source in CXX_SOURCES}
        tools = [cxx_version, paddle.version.full_version, paddle.version.commit]
        if nvcc:  # .cu files see no Paddle, so they take none of its flags
            compile_cuda = [nvcc.path, "-ccbin", toolchain.host_compiler(cxx), *NVCC_FLAGS, *gencode,
                            *macros, "-Iops"]
            commands.update({source: [*compile_cuda, "-c", source] for source in CUDA_SOURCES})
            tools.append(nvcc.version)
        objects = self.compile(commands, tools, ext.depends)

        library_dirs = flags.library_dirs + (nvcc.library_dirs if nvcc else [])
        library = self.get_ext_fullpath(ext.name)
        Path(library).parent.mkdir(parents=True, exist_ok=True)
        self.call("linking", library, [
            *cxx, "-shared", *objects, "-o", library,
            *(f"-L{folder}" for folder in library_dirs), *(f"-Wl,-rpath,{folder}" for folder in library_dirs),
            toolchain.libstdcxx_flag(cxx),
            *flags.extra_link_args, *shlex.split(os.environ.get("LDFLAGS", "")), *NO_FAST_MATH_AT_LINK,
        ])
        self.info = Path(library).with_suffix(".json")
        self.info.write_text(json.dumps({
            "paddle_tag": VERSION_PY["paddle_tag"](paddle),
            "paddle": paddle.version.full_version,
            "cxx": f"{Path(toolchain.host_compiler(cxx)).name} {cxx_version}",
            "nvcc": re.findall(r"release ([\d.]+)|$", nvcc.version)[0] if nvcc else None,
            "gpu_code": gpu_code,
        }, indent=1) + "\n")

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        library, = (self.get_ext_fullpath(ext.name) for ext in self.extensions)
        self.copy_file(str(self.info), str(Path(library).with_suffix(".json")))

    def compile(self, commands, tools, headers):
        """Compiles {source: command} in parallel; returns the objects. An object's name holds a hash of all that it
        is made from, so none is out of date: not after a failed build, nor for another Paddle in the same checkout."""
        folder = ROOT / "build" / "objects"
        folder.mkdir(parents=True, exist_ok=True)
        common = hashlib.sha256(repr(tools).encode())
        for header in headers:
            common.update(header.encode() + (ROOT / header).read_bytes())

        def compile_one(source):
            digest = common.copy()
            digest.update(repr(commands[source]).encode() + (ROOT / source).read_bytes())
            target = folder / f"{Path(source).stem}-{digest.hexdigest()[:20]}.o"
            if not target.exists():
                unfinished = target.with_suffix(f".{os.getpid()}")
                self.call("compiling", source, [*commands[source], "-o", str(unfinished)])
                unfinished.replace(target)
            return str(target)

        jobs = toolchain.max_jobs()
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(compile_one, commands))

    def call(self, doing, name, command):
        print(shlex.join(command), flush=True)
        done = toolchain.run(command)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            toolchain.fail(f"{doing} {name} failed (exit status {done.returncode}); the compiler's messages are above.")


def build_lib():
    """One build/lib folder for each Python and set of modules: a module that is gone stays out of later wheels."""
    modules = "\n".join(files("python/**/*.py"))
    return f"build/lib-{sys.implementation.cache_tag}-{hashlib.sha256(modules.encode()).hexdigest()[:8]}"


def version():
    """That of the sources; in a wheel's and an installation's name also the Paddle it is for: 0.1.0+paddle3.3.cpu."""
    if {"bdist_wheel", "dist_info", "editable_wheel"}.isdisjoint(sys.argv):
        return VERSION_PY["__version__"]
    return f"{VERSION_PY['__version__']}+{VERSION_PY['paddle_tag'](toolchain.import_paddle())}"


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        toolchain.fail(f"paddle-gated-ops builds on Linux only, and this is {sys.platform}.")
    setup(
        version=version(),
        license="Apache-2.0",
        # The CUDA sources join in build_extension, which knows the installed Paddle: an sdist is made without one.
        ext_modules=[Extension("paddle_gated_ops._C", CXX_SOURCES, depends=HEADERS, language="c++")],
        cmdclass={"build_ext": BuildExtension},
        options={"build": {"build_lib": build_lib()}},
    )
