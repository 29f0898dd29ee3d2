#!/usr/bin/env bash
# Runs the kernels' tests and a fuzz with the extension built under AddressSanitizer and UndefinedBehaviorSanitizer, some
# ten minutes on two cores. Paddle itself is not instrumented: leaks, and operator delete for what new[] made, which are its
# own, are not looked for.
# Arguments go to pytest in place of the list of tests. Needs gcc with libasan and libubsan.
set -euo pipefail
. "$(dirname "$0")/env.sh"

sanitize="-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer -g"
library() { "${CXX:-c++}" -print-file-name="$1"; }
site=build/sanitized
say "Building with $sanitize"
CXXFLAGS="$sanitize ${CXXFLAGS:-}" LDFLAGS="$sanitize ${LDFLAGS:-}" \
    "$PYTHON" setup.py -q build_ext --build-lib "$site" >"$site.log" 2>&1 || { tail -20 "$site.log" >&2; exit 1; }
(cd python && find . -name '*.py' -exec cp --parents {} "../$site" \;)

# AddressSanitizer opens what Paddle opens, without Paddle's own list of folders.
export LD_LIBRARY_PATH=$("$PYTHON" -c 'import importlib.util as u; print(u.find_spec("paddle").submodule_search_locations[0])')/libs
# libstdc++ too: the interpreter does not link it, and AddressSanitizer looks for what throws at its start.
export LD_PRELOAD="$(library libasan.so) $(library libubsan.so) $(library libstdc++.so.6)"
# More memory than there is has to be an error of Paddle's, not of AddressSanitizer's: the tests ask for it.
export ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:allocator_may_return_null=1:detect_odr_violation=0:handle_segv=0
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export PYTHONPATH=$site PYTHONMALLOC=malloc GATED_OPS_FUZZ_EXAMPLES=${GATED_OPS_FUZZ_EXAMPLES:-1000}
[ $# -gt 0 ] || set -- $(printf 'tests/test_%s.py ' bwd_out canaries clamp empty errors failures flags foreign_objects forward fuzz memory \
    repeatable rows sums threads values views)
"$PYTHON" -c '
import paddle_gated_ops, ctypes
assert "build/sanitized" in paddle_gated_ops.__file__, paddle_gated_ops.__file__
ctypes.CDLL(None).__asan_init'
# -s: what the sanitizers say is not lost where they end the process. A thousand runs say nothing here that one does not.
"$PYTHON" -m pytest -q -p no:cacheprovider -s -k "not thousand" "$@"
