"""What an eager call from Python costs the host: tensors so small that it is next to nothing else.

On a GPU the call returns once its work is queued. Beside ours stand Paddle's own functions of one and of three outputs
(layer_norm allocates mean and variance too), and the allocation of three tensors alone.
"""

import statistics
import time

import paddle
import paddle.nn.functional as paddle_functional

from paddle_gated_ops import testing

from . import providers, records
from .buffers import make_sets
from .cases import NORM_SIZE, Case

OP = "eager call"
ROWS = 16
_CALLS, _REPEATS = 200, 31


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


def _median_us(function, synchronize):
    times = []
    for _ in range(_REPEATS):
        synchronize()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            function()
        times.append((time.perf_counter() - begin) / _CALLS)
    return 1e6 * statistics.median(times)


def run(device):
    """A record a function."""
    place = paddle.device.get_device()
    synchronize = (lambda: None) if device == "cpu" else paddle.device.synchronize
    return [
        records.without_traffic(OP, ROWS, NORM_SIZE, name, _median_us(function, synchronize))
        for name, function in _functions(place).items()
    ]
