# Source this (bash): makes the project's virtual environment, installs the project there, and exports PYTHON, its
# interpreter. A second run only rebuilds what changed.
#
# Paddle is that of the python3 on PATH, where that one imports paddle (a virtual environment, conda or the system's):
# it is used in place, and nothing is installed there. Else paddlepaddle 3.3.1 is installed. Environment variables:
#   PADDLE_VERSION   install this release, whatever is active, in .venv-$PADDLE_VERSION (or .venv if that has it)
#   PADDLE_PACKAGE   paddlepaddle (default) or paddlepaddle-gpu
#   GATED_OPS_ENV    the environment's folder in the checkout, instead of .venv

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '%s\n' "-- $*"; }
die() { printf '%s\n' "error: $*" >&2; exit 1; }

# Prints "PREFIX|VERSION" of the Paddle that the interpreter $1 imports; not of an environment made here.
paddle_of() {
    "$1" - "$PWD" <<'PY' 2>/dev/null
import importlib.util, os, sys
if os.path.realpath(sys.prefix).startswith(os.path.realpath(sys.argv[1]) + "/.venv"):
    if os.path.exists(os.path.join(sys.prefix, "made-by-tools-env")):
        sys.exit(1)
if importlib.util.find_spec("paddle") is None:
    sys.exit(1)
import paddle
assert hasattr(paddle, "utils")  # not just some folder of that name
print(f"{sys.prefix}|{paddle.version.full_version}")
PY
}

# Prints what keeps the interpreter $1 from building for a Paddle with wheels up to Python 3.$2; nothing if all is well.
unfit() {
    "$1" - "$2" <<'PY' 2>/dev/null || echo "does not run"
import os, sys, sysconfig
name = ".".join(map(str, sys.version_info[:3]))
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
    print(f"is a {sys.implementation.name} {name} without a wheel")
elif not (3, 9) <= sys.version_info[:2] <= (3, int(sys.argv[1])):
    print(f"is Python {name}")
elif not os.path.exists(header):
    print(f"is Python {name} without C headers (no {header}; Debian has them in python3-dev)")
PY
}

# Prints the first interpreter on PATH for which there is a wheel of Paddle $1.
choose_python() {
    local newest=13 command reason seen=""
    [[ $1 == 2.* ]] && newest=12
    for command in python3 python python3.{13,12,11,10,9}; do
        command -v "$command" >/dev/null || continue
        reason=$(unfit "$command" "$newest")
        [ -z "$reason" ] && { command -v "$command"; return; }
        seen+="${seen:+, }$command $reason"
    done
    die "Paddle $1 has wheels for CPython 3.9 to 3.$newest, and of these PATH has none that can build an extension" \
        "(${seen:-no python3 at all}): install one with its C headers, or activate an environment whose python3" \
        "imports paddle."
}

packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# Makes the virtual environment $2 with the interpreter $1.
make_venv() {
    "$1" -m venv --clear "$2" >/dev/null 2>&1 && return
    # Debian keeps ensurepip, which venv calls, in a package of its own; the interpreter's pip can do its work.
    "$1" -m venv --clear --without-pip "$2" ||
        die "$1 cannot make a virtual environment; its message is above (on Debian, install python3-venv)."
    "$1" -m pip install -q --target "$(packages_of "$2/bin/python")" pip ||
        die "$1 has neither ensurepip nor pip: install python3-venv or python3-pip."
}

# Lets the environment of the interpreter $1 see the packages of the interpreter $2, after its own.
borrow_packages() {
    "$2" -c '
import sys
for folder in sys.path:
    if folder.rstrip("/").endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({folder!r})")
' >"$(packages_of "$1")/paddle_of_another_environment.pth"
}

prepare() {
    local package=${PADDLE_PACKAGE:-paddlepaddle} version=${PADDLE_VERSION:-3.3.1}
    local env=${GATED_OPS_ENV:-.venv} python="" active="" key built
    if [ -z "${PADDLE_VERSION:-}${PADDLE_PACKAGE:-}" ] && active=$(paddle_of python3); then
        python=$(command -v python3)
        version=${active#*|}
        key="Paddle $version of ${active%|*}"
    else
        active=""
        unset PYTHONPATH # it could hold another Paddle
        key="$package $version"
        # One environment does where the release asked for is the one in .venv already.
        if [ -n "${PADDLE_VERSION:-}" ] && [ -z "${GATED_OPS_ENV:-}" ]; then
            [ "$(cat .venv/made-by-tools-env 2>/dev/null)" = "$key" ] || env=.venv-$version
        fi
    fi

    if [ -e "$env" ] && [ ! -e "$env/made-by-tools-env" ]; then
        die "$env is there already and was not made by tools/env.sh: move it away, or set GATED_OPS_ENV to another name."
    fi
    if [ "$(cat "$env/made-by-tools-env" 2>/dev/null)" != "$key" ]; then
        [ -n "$python" ] || python=$(choose_python "$version")
        say "$env: $("$python" --version 2>&1), $key"
        make_venv "$python" "$env"
        touch "$env/made-by-tools-env"
        "$env/bin/python" -m pip install -q --upgrade pip setuptools wheel
        if [ -n "$active" ]; then
            borrow_packages "$env/bin/python" "$python"
        else
            local extra=()
            [[ $version == 2.* ]] && extra=("numpy<2" decorator)
            say "Installing $package $version (a large download)"
            "$env/bin/python" -m pip install -q "$package==$version" ${extra[@]+"${extra[@]}"}
        fi
        local loaded
        loaded=$("$env/bin/python" -c 'import paddle; print(paddle.version.full_version)') ||
            die "$key does not load in $env; its own message is above."
        [ "$loaded" = "$version" ] || die "$env loads Paddle $loaded where $version was asked for."
        # Paddle's NumPy stays: what else is installed must fit it.
        "$env/bin/python" -c 'import numpy; print(f"numpy=={numpy.__version__}")' >"$env/constraints.txt"
        echo "$key" >"$env/made-by-tools-env"
    fi

    built=$({
        find ops python setup.py pyproject.toml tools/toolchain.py -type f \
            ! -name '*.so' ! -path '*/__pycache__/*' ! -path '*.egg-info/*' -print0 |
            LC_ALL=C sort -z | xargs -0 sha256sum
        echo "${CXX:-} ${CXXFLAGS:-} ${LDFLAGS:-} ${CUDA_HOME:-} ${PADDLE_CUDA_ARCH_LIST:-}"
    } | sha256sum)
    if [ "$(cat "$env/built-from" 2>/dev/null)" != "$built" ]; then
        say "Building and installing the project in $env"
        rm -f "$env/built-from"
        "$env/bin/python" -m pip install -q --no-build-isolation -c "$env/constraints.txt" ".[test,demo]"
        echo "$built" >"$env/built-from"
    fi
    export PYTHON="$PWD/$env/bin/python"
}

prepare
# Importing Paddle sets this to 1 where it is unset, and the CPU kernels follow it.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
