#!/usr/bin/env bash
# Builds with every compiler at hand, a line each; fails where one fails or warns (-Wall -Wextra). No GPU needed.
#   - C++: g++ 9 to 15 and clang 11 to 21, as far as PATH has them (g++-12, clang++-14, ...): installs the package with it
#     and checks both ops;
#   - nvcc: the CUDA sources, with that of CUDA_HOME or PATH, and with the versions that PyPI has, 13.0 to 13.5;
#   - CUDA 11.8 and 12: PyPI has no nvcc of theirs, but the headers, ptxas and libdevice: the CUDA sources with clang 16 or
#     newer on these (clang_cuda.h lends it what it lacks).
# Arguments are the parts to run: cxx nvcc clang_cuda. All: 25 minutes on two cores and downloads of 2 GB.
set -euo pipefail
. "$(dirname "$0")/env.sh"
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
failed=0

# attempt NAME COMMAND...: a line of the table, and the log where it failed. In COMMAND set -e has no effect.
attempt() {
    local name=$1 rc=0
    shift
    "$@" >"$scratch/log" 2>&1 || rc=$?
    printf '%-60s %s\n' "$name" "$([ $rc = 0 ] && echo passed || echo FAILED)"
    [ $rc = 0 ] || { failed=$((failed + 1)) && tail -n 40 "$scratch/log" >&2; }
}

version_of() { "$1" -dM -E -x c++ /dev/null | sed -n 's/^#define __VERSION__ "\(.*\)"/\1/p'; }

install_and_check() {
    rm -rf "$scratch/site"
    CXX=$1 CXXFLAGS="-Wall -Wextra -Werror" \
        "$PYTHON" -m pip install -q --no-build-isolation --no-deps --target "$scratch/site" . || return
    (cd "$scratch" && PYTHONPATH=site "$PYTHON" -c "import paddle_gated_ops as p; assert '/site/' in p.__file__; p.run_check()")
}

cxx() {
    local compiler
    for compiler in g++-{9..15} clang++-{11..21}; do
        command -v "$compiler" >/dev/null || continue
        attempt "$compiler ($(version_of "$compiler"))" install_and_check "$compiler"
    done
}

# each_source COMMAND...: compiles the CUDA sources with it.
each_source() {
    local source
    for source in ops/*/*_cuda.cu; do
        "$@" -std=c++17 -O3 -Iops -DPADDLE_WITH_CUDA -DPADDLE_GATED_OPS_WITH_CUDA -c "$source" -o "$scratch/object.o" || return
    done
}

# toolkit PACKAGE...: CUDA from PyPI, in $scratch/cuda.
toolkit() {
    rm -rf "$scratch/pypi" "$scratch/cuda"
    "$PYTHON" -m pip install -q --no-deps --target "$scratch/pypi" "$@"
    mkdir "$scratch/cuda"
    local folder
    for folder in "$scratch"/pypi/nvidia/*/; do cp -r "$folder." "$scratch/cuda"; done
}

nvcc() {
    local own=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc release
    # The unknown pragmas are the device's, as the host's half of a function sees them.
    local flags=(-fmad=false -Xcompiler=-fPIC,-Wall,-Wextra,-Wno-unknown-pragmas -Werror=all-warnings -gencode=arch=compute_80,code=sm_80
        -gencode=arch=compute_90,code=sm_90)
    own=$(type -P "$own") && attempt "nvcc $("$own" --version | sed -n 's/.*, V//p') of $own" each_source "$own" "${flags[@]}"
    for release in 13.{0..5}; do
        toolkit nvidia-{cuda-nvcc,cuda-crt,nvvm,cuda-runtime}"==$release.*"
        attempt "nvcc $release from PyPI" each_source "$scratch/cuda/bin/nvcc" "${flags[@]}" \
            -gencode=arch=compute_100,code=sm_100 -gencode=arch=compute_120,code=sm_120
    done
}

clang_cuda() {
    local clang release
    clang=$(for n in {21..16}; do type -P clang++-$n && break; done || true)
    [ -n "$clang" ] || { echo "skipped: there is no clang 16 or newer for PyPI's CUDA 11.8 and 12"; return; }
    for release in 11.8 12.{0..6} 12.8 12.9; do
        toolkit nvidia-{cuda-nvcc,cuda-runtime}-cu"${release%.*}==$release.*"
        touch "$scratch/cuda/include/curand_mtgp32_kernel.h" # clang includes it whatever the source; another package has it
        attempt "CUDA $release from PyPI, through ${clang##*/}" clang_as_nvcc "$clang"
    done
}

# Without a fatbinary program, which PyPI's CUDA 11.8 and 12 lack too, there is no object of both halves.
clang_as_nvcc() {
    local half
    for half in --cuda-host-only "--cuda-device-only --cuda-gpu-arch=sm_80" "--cuda-device-only --cuda-gpu-arch=sm_90"; do
        each_source "$1" -x cuda $half --cuda-path="$scratch/cuda" -include tools/clang_cuda.h -ffp-contract=off \
            -Wall -Wextra -Werror -Wno-unknown-cuda-version || return
    done
}

for part in ${@:-cxx nvcc clang_cuda}; do "$part"; done
[ $failed = 0 ] || { echo "error: $failed of the compilers failed" >&2; exit 1; }
