"""Every public function and layer, called with whatever may come: the right result, or an error that names the argument.

GATED_OPS_FUZZ_EXAMPLES says how many calls in all (tools/fuzz.sh: 10000); `--hypothesis-seed` makes other ones.
"""

import contextlib
import os
import traceback

import paddle
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.layers import LAYERS
from fuzz.numbers import NUMBERS
from fuzz.ops import OPS
from fuzz.programs import program


@pytest.fixture(autouse=True, scope="module")
def on_cpu():
    """Tensors say where they are. What is passed in their place is made by Paddle's kernels, which a GPU may lack."""
    before = paddle.get_device()
    paddle.set_device("cpu")
    yield
    paddle.set_device(before)


EXAMPLES = int(os.environ.get("GATED_OPS_FUZZ_EXAMPLES", 400))
SHORT = "GATED_OPS_FUZZ_EXAMPLES" not in os.environ


def fuzz(share):
    """Settings of a test that makes this share of the calls."""
    return settings(
        max_examples=max(1, round(EXAMPLES * share)),
        deadline=None,
        derandomize=SHORT,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def plain_traceback():
    """Failures as text: pytest would print each argument, and Paddle ends the process where a DistTensor is printed."""
    try:
        yield
    except Exception:
        text = traceback.format_exc()
    else:
        return
    pytest.fail(text, pytrace=False)


@pytest.mark.parametrize("op", OPS)
@fuzz(0.11)
@given(data=st.data())
def test_function(op, data):
    with plain_traceback():
        OPS[op](data.draw)


@pytest.mark.parametrize("layer", LAYERS)
@fuzz(0.05)
@given(data=st.data())
def test_layer(layer, data):
    with plain_traceback():
        LAYERS[layer](data.draw)


@pytest.mark.parametrize("function", NUMBERS)
@fuzz(0.01)
@given(data=st.data())
def test_numbers(function, data):
    with plain_traceback():
        NUMBERS[function](data.draw)


@fuzz(0.11)
@given(data=st.data())
def test_program(data):
    with plain_traceback():
        program(data.draw)
