"""Records of what was measured, the file that holds them, and the table on screen.

A record is a dict: the case's op, rows, columns and layout; provider; and either skipped (str: why) or us (the median time
of a call in microseconds), bytes (the least it has to move), GB/s, copy_us (a copy of as many bytes, in the same run) and
of_copy (that over us). On a CPU fresh_outputs says whether the call allocates its outputs, and what the copy copies into;
others_cores is how many cores other programs kept busy meanwhile. commit stands there if it is not the header's.
"""

import datetime
import json
import platform
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_KEY = ("op", "rows", "columns", "layout", "provider", "fresh_outputs")
EAGER_CALL, LAUNCH = "eager call", "launch"  # what without_traffic() is of
_SAME = ("device", "cpu", "cpu_threads", "gpu")


def timed(case, provider, us, copy_us=None, **more):
    """The record of a time. copy_us is None of a copy itself; more may replace the case's bytes."""
    us = round(us, 3)
    record = {**case._asdict(), "provider": provider, "bytes": case.bytes, **more, "us": us}
    record["GB/s"] = round(record["bytes"] / us / 1e3, 2)
    if copy_us is not None:
        copy_us = round(copy_us * record["bytes"] / case.bytes, 3)
        record.update(copy_us=copy_us, of_copy=round(copy_us / us, 4))
    return record


def without_traffic(op, rows, columns, provider, us):
    """The record of a launch or of a call, whose time is no matter of bytes."""
    return {"op": op, "rows": rows, "columns": columns, "layout": "contiguous", "provider": provider, "us": round(us, 3)}


def skipped(case, provider, reason):
    """The record of what could not be timed."""
    return {**case._asdict(), "provider": provider, "skipped": " ".join(str(reason).split())[:300]}


def copies_of(records):
    """{(op, rows, columns, layout, fresh_outputs): us} of the copies among the records."""
    return {tuple(r.get(k) for k in (*_KEY[:4], "fresh_outputs")): r["us"] for r in records if r["provider"] == "copy"}


def _is_of_this_source(record):
    """Rather than of others' code. Launches and calls are measured anew with it, and what was skipped is tried again."""
    return record["provider"].startswith(("ours", "copy")) or "bytes" not in record


def _commit():
    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "ops", "python", "setup.py", "tools/bench*")
        return git("rev-parse", "HEAD") + (" with changes" if changed else "")
    except OSError:
        return ""


def _cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names) or '?'} cores"


def header(device, threads, versions, commit=None):
    """What the records of a file have in common."""
    return {
        "tool": "tools/bench.py",
        "commit": commit or _commit() or "unknown",
        "date": datetime.date.today().isoformat(),
        "device": device,
        "cpu": _cpu(),
        "cpu_threads": threads,
        "versions": {"Python": platform.python_version(), **versions},
    }


def load(path):
    """The header and the list of records."""
    content = json.loads(Path(path).read_text())
    return content["header"], content["records"]


class File:
    """{"header", "records"}, a record a line: whole on disk after each addition, so that a run that is ended loses nothing.

    Args:
        path (str or Path): the file.
        head (dict): of header().
        add (bool): keep what the file has; where that is of another commit, what others' code took, with that commit's name.

    Raises:
        ValueError: that was measured on another machine. From describe() as well.
    """

    def __init__(self, path, head, add=False):
        self.path, self.head, self._records = Path(path), {}, {}
        if add and self.path.exists():
            self.head, old = load(path)
            before = self.head["commit"]
            if before != head["commit"]:
                others = [record for record in old if not _is_of_this_source(record)]
                old = [{"commit": before, **record} for record in others]
            self._records = {self._key(record): record for record in old}
        self.describe(**head)

    @staticmethod
    def _key(record):
        return tuple(record.get(key) for key in _KEY)

    def describe(self, versions=None, **more):
        """Adds to the header."""
        for key in _SAME:
            if key in self.head and key in more and self.head[key] != more[key]:
                raise ValueError(f"{self.path} has another {key}: {self.head[key]}, not {more[key]}")
        self.head = {**self.head, **more, "versions": {**self.head.get("versions", {}), **(versions or {})}}

    @property
    def records(self):
        """All of them; those of a case stand together."""
        cases = {}
        for record in self._records.values():
            cases.setdefault(tuple(record[key] for key in _KEY[:4]), []).append(record)
        return [record for of_case in cases.values() for record in of_case]

    def add(self, found):
        """Adds records, in place of those of the same cases and providers."""
        for record in found:
            key = self._key(record)
            before = (*key[:-1], None)  # what was skipped has no fresh_outputs
            if "skipped" in self._records.get(before, {}):
                del self._records[before]
            self._records[key] = record
        self.write()

    def write(self):
        """Writes the file."""
        lines = ",\n".join(map(json.dumps, self.records))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(self.path.name + ".part")
        part.write_text(f'{{"header": {json.dumps(self.head, indent=1)},\n"records": [\n{lines}\n]}}\n')
        part.replace(self.path)

    def lacks(self, case, *names):
        """Whether there is no time of one of these providers; of what was skipped there is none."""
        timed = {key[4] for key, record in self._records.items() if key[:4] == tuple(case) and "us" in record}
        return not timed.issuperset(names)


def table(records):
    """The records as aligned text."""
    rows = [("op", "rows x columns", "version", "outputs", "time", "rate", "of copy")]
    for r in records:
        layout = "" if r["layout"] == "contiguous" else f" {r['layout']}"
        outputs = {True: "new", False: "given"}.get(r.get("fresh_outputs"), "")
        if "skipped" in r:
            numbers = (f"skipped: {r['skipped']}", "", "")
        else:
            share = f"{r['of_copy']:.0%}" if "of_copy" in r else ""
            numbers = (f"{r['us']:.1f} us", f"{r['GB/s']:.1f} GB/s" if "GB/s" in r else "", share)
        rows.append((r["op"], f"{r['rows']} x {r['columns']}{layout}", r["provider"], outputs, *numbers))
    disturbed = sum((r.get("others_cores") or 0) >= 0.1 for r in records)
    widths = [max(len(row[k]) for row in rows if not row[4].startswith("skipped")) for k in range(7)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows]
    if disturbed:
        lines.append(f"{disturbed} of {len(records)} figures: other programs kept a tenth of a core or more busy meanwhile.")
    return "\n".join(lines)
