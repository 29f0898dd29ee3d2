#!/usr/bin/env bash
# Builds tools/check_kernels.cu and runs it on the GPU at hand, alone and under each of compute-sanitizer's tools.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$(mktemp)
trap 'rm -f "$program"' EXIT
nvcc -std=c++17 -O3 -lineinfo -fmad=false -Xcompiler -ffp-contract=off -arch="${GPU_ARCH:-native}" -Iops tools/check_kernels.cu \
    ops/*/*_cuda.cu ops/*/*_cpu.cc ops/common/parallel_for.cc -o "$program"
"$program"
for tool in memcheck racecheck initcheck synccheck; do
    echo "-- compute-sanitizer $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$program"
done
