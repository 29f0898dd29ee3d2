#!/usr/bin/env bash
# Builds the extension against the GPU build of Paddle 2.6.2 in .venv-gpu (a download of 600 MB), loads it and checks
# the ops. Needs nvcc but no GPU: without one the CPU kernels of the GPU build are checked.
# Skipped, with exit status 0, where there is no nvcc (CUDA_HOME, else PATH).
set -euo pipefail
if [ ! -x "${CUDA_HOME:-}/bin/nvcc" ] && ! command -v nvcc >/dev/null; then
    echo "skipped: nothing was built for a GPU Paddle, because there is no nvcc in CUDA_HOME or on PATH"
    exit 0
fi
export PADDLE_PACKAGE=paddlepaddle-gpu PADDLE_VERSION=2.6.2 GATED_OPS_ENV=.venv-gpu
. "$(dirname "$0")/env.sh"
"$PYTHON" -c "
import paddle, paddle_gated_ops
assert paddle.is_compiled_with_cuda(), 'this is no GPU build of Paddle'
paddle_gated_ops.run_check()
"
