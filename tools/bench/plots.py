"""The picture of a file of records: for each op the rate over the bytes, and the time over the rows."""

from collections import Counter
from pathlib import Path

import matplotlib

from . import records

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

# Apart for every kind of colour vision (Okabe and Ito's colours), and by their markers in grey.
_COPY = dict(color="#555555", linestyle="--", linewidth=1.2, label="copy")
_STYLES = {
    "ours": dict(color="#0072B2", marker="o", linewidth=2, zorder=3),
    "ours, outputs given": dict(color="#56B4E9", marker="o", linewidth=2, zorder=3),
    "Paddle, unfused": dict(color="#D55E00", marker="s"),
    "Paddle, unfused, FP32 tensors": dict(color="#E69F00", marker="D"),
    "Paddle, fused": dict(color="#E69F00", marker="D"),
    "torch.compile": dict(color="#CC79A7", marker="^"),
    "FLA rms_norm_gated": dict(color="#009E73", marker="v"),
    "Liger SwiGLU (do1 alone)": dict(color="#009E73", marker="v"),
}


_AT_LEAST = 4  # sizes that make a line
_NOT_DRAWN = ("one thread", "captured in Paddle")  # hardly another line than that of the same kernel


def _series(found):
    """{op: (columns, {name: [record] by rows})} of ops with enough contiguous sizes of one width."""
    usable = [r for r in found if "GB/s" in r and r["layout"] == "contiguous"]
    series = {}
    for op in dict.fromkeys(r["op"] for r in usable):
        sizes = {(r["columns"], r["rows"]) for r in usable if r["op"] == op}
        columns, count = Counter(columns for columns, _ in sizes).most_common(1)[0]
        if count < _AT_LEAST:
            continue
        by_name = {}
        for r in sorted(usable, key=lambda r: r["rows"]):
            if (r["op"], r["columns"]) == (op, columns):
                if r["provider"].endswith(_NOT_DRAWN):
                    continue
                name = "copy into new memory" if r["provider"] == "copy" and r.get("fresh_outputs") else r["provider"]
                by_name.setdefault(name, []).append(r)
        series[op] = columns, by_name
    return series


def draw(path):
    """Draws beside the JSON file ``path``: its name with .png. Returns that path, or None where there is too little."""
    head, found = records.load(path)
    series = _series(found)
    if not series:
        return None
    launches = [r["us"] for r in found if r["op"] == records.LAUNCH]
    figure, axes = pyplot.subplots(len(series), 2, figsize=(12, 3.4 * len(series)), squeeze=False, layout="constrained")
    for (rate, time), (op, (columns, by_name)) in zip(axes, series.items()):
        for name, of_name in by_name.items():
            style = {"markersize": 4, "linewidth": 1.3, "label": name, **_STYLES.get(name, {})}
            if name.startswith("copy"):
                style = {**_COPY, "label": name, "linestyle": "--" if name == "copy" else ":"}
            rate.plot([r["bytes"] for r in of_name], [r["GB/s"] for r in of_name], **style)
            time.plot([r["rows"] for r in of_name], [r["us"] for r in of_name], **style)
        for us in launches:
            time.axhline(us, color="#999999", linestyle=":", linewidth=1.2, label="an empty kernel")
        rate.set(xscale="log", ylim=(0, None), xlabel="bytes moved", ylabel="GB/s", title=f"{op}, {columns} columns: rate")
        time.set(xscale="log", yscale="log", xlabel="rows", ylabel="µs a call", title="time")
        time.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(color="#e5e5e5", linewidth=0.8)
        one.set_axisbelow(True)
    machine = head.get("gpu") or f"{head['cpu']}, {head['cpu_threads']} threads"
    figure.suptitle(f"{machine}; commit {head['commit'][:12]}", fontsize=10)
    picture = Path(path).with_suffix(".png")
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
    return picture
