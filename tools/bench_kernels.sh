#!/usr/bin/env bash
# Builds and runs tools/bench_kernels.cu on the GPU at hand: bash tools/bench_kernels.sh [all|swiglu|norm|cases] [nvcc flags ...]
# One JSON line a size; "of_copy" is the share of the rate of a copy of as many bytes, measured in the same run.
set -euo pipefail
cd "$(dirname "$0")/.."
which=${1:-all}
program=$(mktemp)
trap 'rm -f "$program"' EXIT
nvcc -std=c++17 -O3 -fmad=false -Xcompiler -ffp-contract=off -arch="${GPU_ARCH:-native}" "${@:2}" -Iops tools/bench_kernels.cu \
    ops/*/*_cuda.cu ops/*/*_cpu.cc ops/common/parallel_for.cc -o "$program"
"$program" "$which"
