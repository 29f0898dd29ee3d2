#!/usr/bin/env bash
# Runs the test suite in the project's virtual environment (tools/env.sh), in 25 minutes at most, that of making the
# environment included. Arguments go to pytest: `bash tools/test.sh -k errors -x`.
# PADDLE_VERSION=2.6.2 bash tools/test.sh tests against that release, in an environment of its own.
set -euo pipefail
limit_s=1500
. "$(dirname "$0")/env.sh"

rc=0
timeout --signal=INT --kill-after=30 $((limit_s - SECONDS)) "$PYTHON" -m pytest tests/ "$@" || rc=$?
[ "$rc" -ne 124 ] || echo "error: the tests were not done after $((limit_s / 60)) minutes" >&2
exit "$rc"
