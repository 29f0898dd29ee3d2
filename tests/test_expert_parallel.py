"""The example with experts spread over processes (tools/expert_parallel.py), and that its conditions can fail."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from processes import launch

pytest.importorskip("sklearn", reason="the digits come with scikit-learn (the extra 'demo')")

TOOL = Path(__file__).resolve().parents[1] / "tools" / "expert_parallel.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("expert_parallel", TOOL)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.mark.parametrize("processes, seed", [
    (2, 0),
    (2, 1),
    (4, 0),  # in some steps a process has no rows at all
])
def test_equals_one_process(processes, seed):
    status, text = launch(TOOL, "--seed", str(seed), processes=processes)
    assert status == 0, text
    assert text.count("ok  ") >= 3 and f"over {processes} processes" in text and "50 losses" in text, text


# Each breaks one thing, in a copy of the tool, and the condition that must see it.
BROKEN = {
    "the tokens of an expert in another order than one process has": (
        'self.order = np.argsort(expert_of_row, kind="stable")',
        "self.order = np.lexsort((-np.repeat(np.arange(processes), arriving.sum(axis=1)), expert_of_row))",
        "gradients of the experts",
    ),
    "a loss that is not summed over the processes": ("dist.all_reduce(total)", "pass", "first loss"),
    "weights whose gradients are not summed": ("dist.all_reduce(parameter.grad)", "pass", "losses, the last"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_conditions_can_fail(what, tmp_path):
    right, wrong, condition = BROKEN[what]
    source = TOOL.read_text()
    assert source.count(right) == 1
    source = source.replace(right, wrong).replace('os.path.dirname(os.path.abspath(__file__))', repr(str(TOOL.parent)))
    broken = tmp_path / "expert_parallel.py"
    broken.write_text(source)
    status, text = launch(broken)
    assert status != 0, text  # 1, or a signal's where the launcher ends the other process first
    assert any(line.startswith("FAILED") and condition in line for line in text.splitlines()), text


@pytest.mark.parametrize("arguments, message", [(["--steps", "0"], "--steps must be 1 or more"), (["--what"], "--what")])
def test_wrong_arguments(arguments, message):
    status, text = launch(TOOL, *arguments)
    assert status != 0 and message in text


def test_three_processes_are_refused():
    status, text = launch(TOOL, processes=3)
    assert status != 0 and "power of two" in text, text


def test_a_plan_keeps_the_order_of_the_batch(tool):
    # Rows are (process they come from, expert, number): each process gets its experts' rows in the batch's order.
    counts = np.array([[2, 0, 1, 3], [1, 0, 0, 2]])
    rows = [
        [(process, expert, i) for expert, count in enumerate(counts[process]) for i in range(count)] for process in range(2)
    ]
    for rank in range(2):
        plan = tool.Plan(counts, rank)
        mine = range(2 * rank, 2 * rank + 2)
        arriving = [row for process in range(2) for row in rows[process] if row[1] in mine]
        assert [arriving[i] for i in plan.order] == sorted(arriving, key=lambda row: (row[1], row[0], row[2]))
        assert plan.tokens_per_expert == counts[:, list(mine)].sum(axis=0).tolist()
        assert plan.receive_counts == [sum(row[1] in mine for row in rows[process]) for process in range(2)]
        assert plan.send_counts == [counts[rank, :2].sum(), counts[rank, 2:].sum()]


@pytest.mark.parametrize("losses, met", [
    ([2.0, 1.0], [True, True]),
    ([2.0 * (1 + 2**-17), 1.0], [False, True]),
    ([2.0, 1.011], [True, False]),
    ([2.0, float("nan")], [True, False]),
])
def test_losses_are_compared(tool, losses, met):
    assert [condition[0] for condition in tool.conditions(True, losses, [2.0, 1.0])] == [True, *met]
