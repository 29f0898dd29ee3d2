#!/usr/bin/env bash
# Calls every public function and layer 10000 times with whatever may come (tests/test_fuzz.py), in ten minutes at most:
#     bash tools/fuzz.sh [EXAMPLES]
# SEED=N repeats the calls of a run, which prints its own. Where the process dies, the last call is printed.
set -euo pipefail
seed=${SEED:-$RANDOM}
. "$(dirname "$0")/env.sh"

last=$(mktemp)
trap 'rm -f "$last"' EXIT
say "seed $seed"
rc=0
GATED_OPS_FUZZ_EXAMPLES=${1:-10000} GATED_OPS_FUZZ_LAST_CALL=$last timeout --signal=INT --kill-after=30 600 \
    "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_fuzz.py --hypothesis-seed "$seed" || rc=$?
[ "$rc" -lt 128 ] || { echo "error: the process died of signal $((rc - 128)) in this call:" >&2; cat "$last" >&2; }
exit "$rc"
