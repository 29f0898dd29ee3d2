"""The README's tables of a file of records: `python tools/bench.py --draw FILE` prints them."""

from . import cases
from .records import EAGER_CALL

_NONE = "–"
_LAYOUTS = {"contiguous": "", "unaligned": ", rows unaligned", "sliced": ", z a slice of 512 columns"}
_SIZES = {True: "rows × intermediate size", False: "rows of 128"}
_NAMES = {
    "swiglu_weighted_bwd": "`fused_swiglu_weighted_bwd`",
    "rmsnorm_silu_gate_bwd": "`cake_rmsnorm_silu_gate_train_backward`",
}
# Columns: heading, provider, whether the forward's time stands there, and fresh_outputs of its records.
_GPU_COLUMNS = {
    "swiglu_weighted_bwd": [
        ("{}", "ours", False, None),
        ("torch.compile", "torch.compile", False, None),
        ("Liger, do1 alone", "Liger SwiGLU (do1 alone)", False, None),
        ("forward", "ours", True, None),
        ("torch.compile", "torch.compile", True, None),
    ],
    "rmsnorm_silu_gate_bwd": [
        ("{}", "ours", False, None),
        ("FLA", "FLA rms_norm_gated", False, None),
        ("torch.compile", "torch.compile", False, None),
        ("forward", "ours", True, None),
        ("FLA", "FLA rms_norm_gated", True, None),
        ("torch.compile", "torch.compile", True, None),
    ],
}
_CPU_COLUMNS = [
    ("{}, outputs given", "ours, outputs given", False, False),
    ("outputs new", "ours", False, True),
    ("Paddle's functions, BF16 cast to FP32 and back", "Paddle, unfused", False, True),
    ("the same, FP32 tensors", "Paddle, unfused, FP32 tensors", False, True),
    ("torch.compile", "torch.compile", False, True),
]


def time_in_words(us):
    """Three digits at most, and a unit."""
    for unit in ("µs", "ms"):
        if us < 999.5:
            return f"{us:.0f} {unit}" if us >= 99.95 else f"{us:.1f} {unit}"
        us /= 1000
    return f"{us:.1f} s"


def _cell(record, rate):
    """The time; of this library the share of a copy's rate as well, and the rate if that is wanted."""
    if record is None:
        return _NONE
    words = [time_in_words(record["us"])]
    if record["provider"].startswith("ours"):
        if rate:
            words.append(f"{record['GB/s'] / 1000:.2f} TB/s")
        words.append(f"{record['of_copy']:.0%}".replace("%", " %"))
    return ", ".join(words)


def _line(cells):
    return f"| {' | '.join(cells)} |"


def tables(head, records):
    """Lines of Markdown: a table for each backward, of the sizes of cases.table that are in the records."""
    on_gpu = head["device"] == "gpu"
    found = {}
    for r in records:
        if "us" in r:
            found[r["op"], r["rows"], r["columns"], r["layout"], r["provider"], r.get("fresh_outputs")] = r
    lines = []
    for op, name in _NAMES.items():
        columns = _GPU_COLUMNS[op] if on_gpu else _CPU_COLUMNS
        headings = [_SIZES[op.startswith("swiglu")], *(heading.format(name) for heading, *_ in columns)]
        rows = []
        for case in cases.table(op, head["device"]):
            forward = case._replace(op=op.replace("_bwd", ""))
            cells = [
                _cell(found.get((*(forward if is_forward else case), provider, fresh)), rate=on_gpu and not is_forward)
                for _, provider, is_forward, fresh in columns
            ]
            if cells[0] != _NONE:
                size = f"{case.rows} × {case.columns}" if case.is_swiglu else str(case.rows)
                rows.append([size + _LAYOUTS[case.layout], *cells])
        if rows:
            lines += [_line(headings), "|---" * len(headings) + "|", *map(_line, rows), ""]
    calls = {r["provider"]: r["us"] for r in records if r["op"] == EAGER_CALL}
    return lines + [f"An eager call, {provider}: {us:.1f} µs" for provider, us in calls.items()]
