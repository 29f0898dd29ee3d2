"""Large new CPU outputs ask for huge pages, their whole huge pages alone; an environment variable switches it off."""

from pathlib import Path

import pytest

from calls import run_python

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs a kernel with transparent huge pages"
)

ADVISED = """
import paddle
import paddle_gated_ops.incubate.nn.functional as F

HUGE = 2 << 20

def is_advised(address):
    for line in open("/proc/self/smaps"):
        field = line.split()[0]
        if not field.endswith(":"):
            begin, end = (int(bound, 16) for bound in field.split("-"))
        elif field == "VmFlags:" and begin <= address < end:
            return "hg" in line.split()

def advised_places(rows):
    x = paddle.ones([rows, 128], "bfloat16")
    grad_x = F.cake_rmsnorm_silu_gate_train_backward(x, x, x, x[0])[0]
    begin = grad_x.data_ptr()
    end = begin + rows * 256
    first, last = -(-begin // HUGE) * HUGE, end // HUGE * HUGE
    whole = {is_advised(address) for address in range(first, last, HUGE)}
    parts = {is_advised(address) for address, within in ((begin, begin < first), (last, last < end)) if within}
    return whole, parts

small, large = advised_places(12_000), advised_places(50_000)  # 3 and 12 MiB
assert True not in small[0] | small[1] | large[1], (small, large)
print(large[0])
"""


@pytest.mark.parametrize("wanted, whole", [(None, {True}), ("1", {True}), ("0", {False})])
def test_whole_huge_pages_of_large_outputs(wanted, whole):
    assert run_python(ADVISED, GATED_OPS_HUGE_PAGES=wanted) == str(whole)
