"""What setup.py builds with: the installed Paddle, a C++ compiler and, for a GPU Paddle, nvcc.

Each function returns what the build needs or ends the process with one sentence that says what is missing.
"""
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import warnings
from importlib.util import find_spec
from types import SimpleNamespace

MIN_PADDLE = [2, 6]
MIN_GXX, MIN_CLANG = 8, 7  # the first releases with all of C++17
MIN_CUDA_ARCH = 80  # BF16 arithmetic starts there
CUDA_11_8_ARCH = 90  # the newest that CUDA 11.8 knows, whose launch attributes the kernels use, and 11.7 does not
DEFAULT_CUDA_ARCHS = (80, 90, 100)


def fail(sentence):
    # SystemExit, because setuptools wraps any Exception of an editable build in a page of traceback.
    raise SystemExit(f"error: {sentence}")


def max_jobs():
    """How many compilers run at once: MAX_JOBS, else one a core."""
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
    if not re.fullmatch(r"0*[1-9]\d{0,3}", jobs):
        fail(f"MAX_JOBS must be a number of compilers to run at once, 1 to 9999, but is '{jobs}'.")
    return int(jobs)


def run(command):
    # nvcc adds the flags of these two, --use_fast_math perhaps, to its own: ours decide the numbers.
    kept = {name: value for name, value in os.environ.items() if name not in ("NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS")}
    return subprocess.run(command, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")


def import_paddle():
    """The Paddle that the extension will run with.

    A library built against one Paddle does not load into another, so the only right one is the one installed in
    the environment that receives the package. Build isolation hides that environment from setup.py (and would
    install whichever paddlepaddle is newest, a CPU build, if build-system.requires named it): look behind it. pip keeps
    its interpreter; `python -m build` makes an environment that knows the outer one only if that one is activated. The
    folders go to the end of sys.path, so that the isolated setuptools stays the one in use.
    """
    activated = filter(None, (os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")))
    for folder in site.getsitepackages() + site.getsitepackages(activated):
        if find_spec("paddle") is None:
            site.addsitedir(folder)
    # A build needs neither ccache nor a GPU.
    warnings.filterwarnings("ignore", message="No ccache found|You are using GPU version Paddle")
    try:
        import paddle
    except Exception as cause:
        fail(
            f"Paddle is needed to build paddle-gated-ops, and {sys.executable} cannot import it "
            f"({type(cause).__name__}: {str(cause).strip() or 'no message'}); install paddlepaddle or "
            "paddlepaddle-gpu there, and activate its environment or switch build isolation off (pip install "
            "--no-build-isolation, python -m build --no-isolation) if the build still does not see it."
        )
    if paddle.is_compiled_with_rocm():
        fail("This Paddle is a ROCm build; paddle-gated-ops has kernels for CPU and CUDA only.")
    release = [int(number) for number in re.findall(r"\d+", paddle.version.full_version)[:2]]
    if [0, 0] < release < MIN_PADDLE:  # 0.0.0 is a build from Paddle's sources
        minimum = ".".join(map(str, MIN_PADDLE))
        fail(f"This is Paddle {paddle.version.full_version}; paddle-gated-ops needs {minimum} or newer.")
    return paddle


def find_cxx():
    """The C++ compiler's command ($CXX, else c++, g++ or clang++ on PATH) and its version, as (list, str)."""
    if os.environ.get("CXX", "").strip():
        command = shlex.split(os.environ["CXX"])
        if shutil.which(command[0]) is None:
            fail(f"CXX is '{os.environ['CXX']}', and there is no such command.")
    else:
        command = [name for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]
        if not command:
            fail(f"No C++ compiler on PATH: install g++ {MIN_GXX} or newer or clang {MIN_CLANG} or newer, or set CXX.")
    # Asked for its macros a compiler names itself truly, whatever the command is called.
    definitions = run([*command, "-dM", "-E", "-x", "c++", os.devnull]).stdout
    macros = dict(re.findall(r"^#define (\w+) (.*)$", definitions, re.M))
    clang, gcc = macros.get("__clang_major__"), macros.get("__GNUC__")
    name, major, minimum = ("clang", clang, MIN_CLANG) if clang else ("g++", gcc, MIN_GXX)
    if major is None:
        fail(f"The C++ compiler '{shlex.join(command)}' does not work: it cannot preprocess an empty file.")
    if int(major) < minimum:
        fail(
            f"The C++ compiler '{shlex.join(command)}' is {name} {major}, which is too old for C++17: "
            f"g++ {MIN_GXX} or newer or clang {MIN_CLANG} or newer is needed (choose one with CXX)."
        )
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        fail(f"Python's C headers are missing ({header}): install python3-dev, or use a Python that brings them.")
    return command, macros.get("__VERSION__", major).strip('"')


def host_compiler(cxx):
    """The compiler itself in a command such as `ccache g++ -m64`, for nvcc, which takes no more than that."""
    return next(word for word in cxx if os.path.basename(word) not in ("ccache", "sccache", "distcc", "icecc"))


def libstdcxx_flag(cxx):
    """Links the shared C++ library, also for a compiler that has a static one alone.

    A second, static copy in the extension shares the locales of the copy in the process but not their table: the first
    number written to a stream, by Paddle's headers in an error message, would crash.
    """
    has_shared = os.path.isabs(run([*cxx, "-print-file-name=libstdc++.so"]).stdout.strip())
    return "-lstdc++" if has_shared else "-l:libstdc++.so.6"


def find_nvcc():
    """nvcc of CUDA_HOME (or CUDA_PATH), else on PATH: .path, .version, .home, .include_dirs, .library_dirs, .codes."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if path is None:
        where = f"{home}/bin has none (from CUDA_HOME)" if home else "none is on PATH and CUDA_HOME is not set"
        fail(f"The installed Paddle is a GPU build, which needs nvcc, and {where}: install the CUDA toolkit.")
    codes = run([path, "--list-gpu-code"])
    if codes.returncode or max(_architectures(codes.stdout.split()), default=0) < CUDA_11_8_ARCH:
        fail(f"{path} is too old or does not work: CUDA 11.8 or newer is needed.")
    # nvcc says itself where its toolkit lies; its path does not, where it is a link or a wrapper script.
    report = run([path, "--dryrun", "-E", "-x", "cu", os.devnull]).stdout
    lines = dict(re.findall(r"^#\$ (\w+)= ?(.*)$", report, re.M))

    def folders(*names):
        words = [re.sub("^-[IL]", "", word) for name in names for word in shlex.split(lines.get(name, ""))]
        return [os.path.realpath(word) for word in words if word != "-isystem" and not word.endswith("/stubs")]

    return SimpleNamespace(
        path=path,
        version=run([path, "--version"]).stdout,
        home=os.path.realpath(lines.get("TOP") or os.path.join(os.path.dirname(os.path.realpath(path)), "..")),
        include_dirs=folders("INCLUDES", "SYSTEM_INCLUDES"),  # the latter has CUDA 13's Thrust, which Paddle includes
        library_dirs=folders("LIBRARIES"),
        codes=set(codes.stdout.split()),
    )


def _architectures(codes):
    """The numbers of sm_80 and the like, in order."""
    return sorted(int(code[3:]) for code in codes if re.fullmatch(r"sm_\d+", code))


def gencode_flags(arch_list, codes):
    """nvcc's -gencode flags.

    arch_list: PADDLE_CUDA_ARCH_LIST as people write it, "8.0 9.0", "8.0;9.0a,10.0+PTX" or "80 90". Empty: machine
        code for 8.0, 9.0 and 10.0 as far as this nvcc knows them, and PTX of the newest of these, from which the
        driver compiles for later GPUs.
    codes: what `nvcc --list-gpu-code` prints, {"sm_80", ...}.
    """
    known = _architectures(codes)
    names = ", ".join(f"{n // 10}.{n % 10}" for n in known if n >= MIN_CUDA_ARCH)
    words = [word for word in re.split(r"[\s,;]+", arch_list) if word]
    if not words:
        numbers = [n for n in DEFAULT_CUDA_ARCHS if n in known]
        if not numbers:
            fail("This nvcc knows none of the GPU architectures 8.0, 9.0 and 10.0: PADDLE_CUDA_ARCH_LIST must name others.")
        words = [str(n) for n in numbers]
        words[-1] += "+PTX"
    flags = []
    for word in words:
        match = re.fullmatch(r"(?:(\d+)\.(\d)|(\d{2,3}))([af]?)(\+PTX)?", word, re.I)
        if match is None:
            fail(f"PADDLE_CUDA_ARCH_LIST holds '{word}', which is no GPU architecture; write '8.0 9.0' or '9.0+PTX'.")
        major, minor, digits, suffix, ptx = match.groups()
        number = str(int(digits or major + minor))
        if int(number) < MIN_CUDA_ARCH:
            fail(f"PADDLE_CUDA_ARCH_LIST holds '{word}'; the kernels need 8.0 or newer.")
        if int(number) not in known:
            fail(f"PADDLE_CUDA_ARCH_LIST holds '{word}', which this nvcc does not know; it knows {names}.")
        if suffix and int(number) < {"a": 90, "f": 100}[suffix.lower()]:
            fail(f"PADDLE_CUDA_ARCH_LIST holds '{word}'; the suffix a begins with 9.0a, and f with 10.0f.")
        number += suffix.lower()
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if ptx:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return list(dict.fromkeys(flags))
