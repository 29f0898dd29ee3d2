"""The README's Python snippets run as pasted, each in a process of its own, and its figures are those of the results."""

import os
import re
import subprocess
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
README = os.path.join(ROOT, "README.md")
sys.path.insert(0, os.path.join(ROOT, "tools"))
from bench import records, summary  # noqa: E402


def snippets(text):
    """(line number, source) of each Python block."""
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start()) + 1, block.group(1)) for block in blocks]


def read():
    with open(README, encoding="utf-8") as file:
        return file.read()


ALL = snippets(read())


@pytest.mark.parametrize("source", [source for _, source in ALL], ids=[f"line {line}" for line, _ in ALL])
def test_snippet(tmp_path, source):
    # A file, as to_static reads the source of what it translates; run where there is nothing else to import.
    script = tmp_path / "snippet.py"
    script.write_text(source)
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_every_block_is_found():
    text = read()
    assert len(ALL) == text.count("```python")
    for name in ("fused_swiglu_weighted_bwd", "cake_rmsnorm_silu_gate_train_backward"):
        assert any(name in source for _, source in ALL), name


TRAINING = {
    "eager mode": r"\.backward\(\)",
    "a static program": r"paddle\.enable_static\(\)",
    "to_static": r"paddle\.jit\.to_static",
}


@pytest.mark.parametrize("kind", TRAINING)
def test_a_training_step_is_shown_in(kind):
    matching = [source for _, source in ALL if re.search(TRAINING[kind], source) and "optimizer" in source]
    assert matching, f"no snippet trains in {kind}"


def test_the_installs_are_those_of_the_results():
    with open(os.path.join(ROOT, "tools/results/install_matrix.md"), encoding="utf-8") as file:
        results = file.read()
    section = read().split("### Installs\n")[1].split("\n## ")[0]
    passed, date = re.search(r"^(\d+ of \d+ cells passed) on ([\d-]+)", section, re.MULTILINE).groups()
    assert results.startswith(f"# Installs, {date}\n\n{passed}, ")
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert len(lines) > 10 and set(lines) <= set(results.splitlines())


@pytest.mark.parametrize("name", ["cpu", "h200"])
def test_the_times_are_those_of_the_results(name):
    # `python tools/bench.py --draw tools/results/NAME.json` prints these lines.
    head, found = records.load(os.path.join(ROOT, "tools/results", f"{name}.json"))
    lines = [line for line in summary.tables(head, found) if line.startswith("|")]
    assert len(lines) > 10 and set(lines) <= set(read().splitlines())
    assert f"at commit {head['commit'][:7]} ([all figures](tools/results/{name}.json))" in " ".join(read().split())
