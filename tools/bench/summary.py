"""The README's tables of a file of records: `python tools/bench.py --draw FILE` prints them."""

from . import cases

_LAYOUTS = {"contiguous": "", "unaligned": ", rows unaligned", "sliced": ", z a slice of 512 columns"}
_SIZES = {True: "rows × intermediate size", False: "rows of 128"}
_NAMES = {
    "swiglu_weighted_bwd": "`fused_swiglu_weighted_bwd`",
    "rmsnorm_silu_gate_bwd": "`cake_rmsnorm_silu_gate_train_backward`",
}
# A column's heading, its provider, whether that is a forward, whether its rate or share of a copy's is shown.
_GPU_COLUMNS = {
    "swiglu_weighted_bwd": [
        ("torch.compile", "torch.compile", False), ("Liger, do1 alone", "Liger SwiGLU (do1 alone)", False),
        ("forward", "ours", True), ("torch.compile", "torch.compile", True),
    ],
    "rmsnorm_silu_gate_bwd": [
        ("FLA", "FLA rms_norm_gated", False), ("torch.compile", "torch.compile", False),
        ("forward", "ours", True), ("FLA", "FLA rms_norm_gated", True), ("torch.compile", "torch.compile", True),
    ],
}  # fmt: skip
_CPU_COLUMNS = [
    ("outputs given", "ours, outputs given", False),
    ("outputs new", "ours", True),
    ("Paddle's functions, BF16 cast to FP32 and back", "Paddle, unfused", True),
    ("the same, FP32 tensors", "Paddle, unfused, FP32 tensors", True),
    ("torch.compile", "torch.compile", True),
]


def time_in_words(us):
    """Three digits at most, and a unit."""
    for unit in ("µs", "ms"):
        if us < 999.5:
            return f"{us:.0f} {unit}" if us >= 99.95 else f"{us:.1f} {unit}"
        us /= 1000
    return f"{us:.1f} s"


def _cell(record, rate=False):
    if record is None:
        return "–"
    words = [time_in_words(record["us"])]
    if rate:
        words.append(f"{record['GB/s'] / 1000:.2f} TB/s")
    if record["provider"].startswith("ours") and "of_copy" in record:
        words.append(f"{record['of_copy']:.0%}".replace("%", " %"))
    return ", ".join(words)


def _table(op, headings, rows):
    first = _SIZES[op.startswith("swiglu")]
    return [f"| {first} | " + " | ".join(headings) + " |", "|---" * (len(headings) + 1) + "|", *rows, ""]


def tables(head, records):
    """Lines of Markdown: a table for each backward, of the sizes of cases.table that are in the records."""
    on_gpu = head["device"] == "gpu"
    found = {(r["op"], r["rows"], r["columns"], r["layout"], r["provider"], r.get("fresh_outputs")): r
             for r in records if "us" in r}  # fmt: skip
    lines = []
    for op, name in _NAMES.items():
        rows = []
        for case in cases.table(op, head["device"]):
            forward = case._replace(op=op.replace("_bwd", ""))
            if on_gpu:
                cells = [_cell(found.get((*case, "ours", None)), rate=True)]
                cells += [_cell(found.get((*(forward if is_forward else case), provider, None)))
                          for _, provider, is_forward in _GPU_COLUMNS[op]]  # fmt: skip
            else:
                cells = [_cell(found.get((*case, provider, fresh))) for _, provider, fresh in _CPU_COLUMNS]
            if cells[0] != "–":
                size = f"{case.rows} × {case.columns}" if case.is_swiglu else str(case.rows)
                rows.append(f"| {size}{_LAYOUTS[case.layout]} | " + " | ".join(cells) + " |")
        headings = [name, *(c[0] for c in _GPU_COLUMNS[op])] if on_gpu else [f"{name}, {_CPU_COLUMNS[0][0]}",
                                                                            *(c[0] for c in _CPU_COLUMNS[1:])]
        if rows:
            lines += _table(op, headings, rows)
    calls = {r["provider"]: r["us"] for r in records if r["op"] == "eager call"}
    lines += [f"An eager call, {provider}: {us:.1f} µs" for provider, us in calls.items()]
    return lines
