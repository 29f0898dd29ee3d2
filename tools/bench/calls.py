"""What an eager call from Python costs the host: tensors so small that it is next to nothing else.

On a GPU the call returns once its work is queued. Beside ours stand Paddle's own functions of one and of three outputs
(layer_norm allocates mean and variance too), and the allocation of three tensors alone. All this with a new allocator of
Paddle's: after large tensors it takes longer.
"""

import statistics
import time

import paddle
import paddle.nn.functional as paddle_functional

from paddle_gated_ops import testing

from . import providers, records
from .buffers import make_sets
from .cases import NORM_SIZE, Case

ROWS = 16
_CALLS, _REPEATS = 100, 101


def _functions(place):
    """Functions to call, by name."""
    found = {}
    for op in ("swiglu_weighted_bwd", "rmsnorm_silu_gate_bwd"):
        _, sets = make_sets(Case(op, ROWS, NORM_SIZE), place, 1, with_outputs=True)
        for provider in providers.ours(op, sets):
            found[f"{op}, {provider.name}"] = lambda call=provider.timed_call(): call(0)
    x, y = (testing.float_tensor([[k + 1.0] * NORM_SIZE] * ROWS, place) for k in range(2))
    weight = y[0]
    found["Paddle's add"] = lambda: paddle.add(x, y)
    found["Paddle's layer_norm"] = lambda: paddle_functional.layer_norm(x, [NORM_SIZE], weight, weight)
    found["three of paddle.empty"] = lambda: [paddle.empty([ROWS, NORM_SIZE], "bfloat16") for _ in range(3)]
    return found


def run(device):
    """A record a function: the median of many turns, which the functions take one after the other."""
    functions = _functions(paddle.device.get_device())
    synchronize = (lambda: None) if device == "cpu" else paddle.device.synchronize
    times = {name: [] for name in functions}
    for _ in range(_REPEATS):
        for name, function in functions.items():
            synchronize()
            begin = time.perf_counter()
            for _ in range(_CALLS):
                function()
            times[name].append((time.perf_counter() - begin) / _CALLS)
    medians = {name: 1e6 * statistics.median(of_name) for name, of_name in times.items()}
    return [records.without_traffic(records.EAGER_CALL, ROWS, NORM_SIZE, name, us) for name, us in medians.items()]
