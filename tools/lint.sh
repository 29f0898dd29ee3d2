#!/usr/bin/env bash
# ruff, clang-format and mypy, of the versions that pyproject.toml names. `bash tools/lint.sh --fix` mends what they can mend.
set -euo pipefail
. "$(dirname "$0")/env.sh"
"$PYTHON" -m pip install -q --group lint
PATH=$(dirname "$PYTHON"):$PATH
mapfile -t cpp < <(find ops tools -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh')
if [ "${1:-}" = --fix ]; then
    ruff check --fix .
    clang-format -i "${cpp[@]}"
else
    ruff check .
    clang-format --dry-run -Werror "${cpp[@]}"
fi
mypy
