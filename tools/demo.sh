#!/usr/bin/env bash
# Makes the project's virtual environment (tools/env.sh), trains a small mixture-of-experts classifier of handwritten
# digits whose experts' and norm's gradients are the two ops, and says whether all is well (exit status 1: it is not).
# Arguments go to the training: `bash tools/demo.sh --help`, `bash tools/demo.sh --seed 7`.
set -euo pipefail
. "$(dirname "$0")/env.sh"

exec "$PYTHON" tools/demo "$@"
