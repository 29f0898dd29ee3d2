#!/usr/bin/env bash
# Compiles all that a GPU build compiles, without a GPU and without a GPU build of Paddle (tools/build_gpu_wheel.sh
# builds against one):
#   - each ops/*/*_cuda.cu for sm_80 and sm_90; prints each kernel's registers and fails where one spills any, or at a warning;
#   - the programs in tools/*.cu, which need a GPU to run;
#   - ops/module.cc and each ops/*/*_op.cc as for a GPU build, against the headers of Paddle 3.3.1 and 2.6.2, whose
#     CPU packages hold the GPU headers too (a syntax check).
# Skipped, with exit status 0, where there is no nvcc (CUDA_HOME, else PATH).
set -euo pipefail
cd "$(dirname "$0")/.."

if [ ! -x "${CUDA_HOME:-}/bin/nvcc" ] && ! command -v nvcc >/dev/null; then
    echo "skipped: the CUDA sources were not compiled, because there is no nvcc in CUDA_HOME or on PATH"
    exit 0
fi
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
macros=(-DPADDLE_WITH_CUDA -DPADDLE_GATED_OPS_WITH_CUDA '-DPADDLE_GATED_OPS_GPU_CODE=""')

for version in 3.3.1 2.6.2; do
    python=$(export PADDLE_VERSION=$version; . tools/env.sh >&2; echo "$PYTHON")
    # What setup.py would use: nvcc, its folders, the flags.
    eval "$("$python" - <<'PY'
import shlex, sysconfig
import setup, toolchain  # toolchain: setup.py has put tools/ on the path
from paddle.utils.cpp_extension.extension_utils import find_paddle_includes
nvcc = toolchain.find_nvcc()
folders = ["ops", *find_paddle_includes(), sysconfig.get_path("include"), *nvcc.include_dirs]
for name, words in {
    "nvcc": [nvcc.path],
    "nvcc_flags": setup.NVCC_FLAGS,
    "cuda_sources": setup.CUDA_SOURCES,
    "cxx": [*toolchain.find_cxx()[0], *setup.CXX_FLAGS, "-w", "-DPADDLE_WITH_CUSTOM_KERNEL"],
    "includes": [f"-I{folder}" for folder in folders],
    "glue": [source for source in setup.CXX_SOURCES if source.endswith(("_op.cc", "/module.cc"))],
}.items():
    print(f"{name}=({shlex.join(words)})")
PY
)"
    for source in "${glue[@]}"; do
        echo "-- $source against Paddle $version's GPU headers"
        "${cxx[@]}" "${macros[@]}" "${includes[@]}" -fsyntax-only "$source"
    done
done

# compile SOURCE ARCH [FLAG...]
compile() {
    echo "-- $1 for sm_$2"
    log=$scratch/$(basename "$1").sm_$2.log
    # The unknown pragmas are the device's, as the host's half of a function sees them.
    "$nvcc" "${nvcc_flags[@]}" -Xcompiler=-Wall,-Wextra,-Wno-unknown-pragmas -Werror=all-warnings \
        "${macros[@]}" -Iops "-gencode=arch=compute_$2,code=sm_$2" "${@:3}" \
        -c "$1" -o "$scratch/object.o" >"$log" 2>&1 || { cat "$log"; exit 1; }
}

for source in tools/*.cu; do compile "$source" 90; done
spilling=0
for source in "${cuda_sources[@]}"; do
    for arch in 80 90; do
        compile "$source" "$arch" -Xptxas -v
        # ptxas gives three lines to a kernel: its name, its stack and spills, its registers.
        awk '/Compiling entry function/ { split($0, part, "\x27"); kernel = part[2] }
             /bytes spill stores/ { spills = $5 + $9 }
             / registers/ { match($0, /Used [0-9]+/); print substr($0, RSTART + 5, RLENGTH - 5), spills, kernel }' \
            "$log" | c++filt >"$log.table"
        [ -s "$log.table" ] || { cat "$log"; echo "error: ptxas reported no kernel for $source" >&2; exit 1; }
        echo "registers, bytes spilled, kernel"
        sort -k3 "$log.table"
        spilling=$((spilling + $(awk '$2 > 0' "$log.table" | wc -l)))
    done
done
[ "$spilling" -eq 0 ] || { echo "error: $spilling kernels spill registers" >&2; exit 1; }
