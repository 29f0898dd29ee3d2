"""What is timed: an op, a size and a layout. Alone: neither Paddle nor PyTorch, as peers read cases too."""

import math
from typing import NamedTuple

NORM_SIZE = 128
# Clamps a third of the elements, and is no BF16 number: Paddle's releases differ in the gradient at equality.
CLAMP_VALUE = 1.002

#: Bytes an element and a row of each op: read and written once, nothing else.
_TRAFFIC = {
    "swiglu_weighted_bwd": (12, 8),
    "swiglu_weighted_clamp_bwd": (12, 8),
    "swiglu_weighted": (6, 4),
    "rmsnorm_silu_gate_bwd": (10, 0),
    "rmsnorm_silu_gate": (6, 0),
}
OPS = tuple(_TRAFFIC)


class Case(NamedTuple):
    """One line of the table.

    Attributes:
        op (str): one of OPS.
        rows (int): tokens, or tokens times heads.
        columns (int): the intermediate size; 128 for the norm.
        layout (str): "contiguous"; of SwiGLU "unaligned", o1 beginning between 4-byte boundaries; of the norm "sliced", z
            being 128 of 512 columns of a packed projection.
    """

    op: str
    rows: int
    columns: int
    layout: str = "contiguous"

    @property
    def bytes(self):
        """The least that has to be moved."""
        element, row = _TRAFFIC[self.op]
        return self.rows * (element * self.columns + row)

    @property
    def period(self):
        """Random inputs repeat after as many rows: drawing them all would take longer than the timing."""
        return max(1, 2**19 // self.columns)

    @property
    def is_swiglu(self):
        return self.op.startswith("swiglu")

    def sets(self, rotate):
        """How many sets of buffers move more than ``rotate`` bytes, so that no cache holds the next call's."""
        return max(1, math.ceil(rotate / self.bytes))

    def __str__(self):
        layout = "" if self.layout == "contiguous" else f" {self.layout}"
        return f"{self.op} {self.rows}x{self.columns}{layout}"


def _swiglu(op, sizes):
    return [Case(op, *size) for size in sizes]


def _norm(op, sizes):
    return [Case(op, size[0], NORM_SIZE, *size[1:]) for size in sizes]


# Sizes people run, what is inside and past the caches, and what does not fit vectors of 8 columns.
_SWIGLU_GPU = [
    (8, 2048), (1024, 2048), (4096, 1536), (10112, 3584), (24576, 2048), (65536, 768), (131072, 1024), (65536, 1408),
    (131072, 1536), (65536, 2048), (60000, 3584), (32768, 7168), (65536, 2050), (65536, 2047), (65536, 2048, "unaligned"),
]  # fmt: skip
_NORM_GPU = [(16,), (64,), (512,), (4096,), (32768,), (131072,), (524288,), (2097152,), (524288, "sliced")]
_SWIGLU_CPU = [
    (16, 128), (64, 2048), (2730, 2048), (8192, 2048), (10112, 3584), (65536, 768), (43690, 2048), (8192, 2047),
    (8192, 2048, "unaligned"),
]  # fmt: skip
_NORM_CPU = [(16,), (512,), (4096,), (52428,), (131072,), (838860,), (131072, "sliced")]
_SWEEP_COLUMNS = 2048
_QUICK = {True: [(16, 128), (256, 512)], False: [(16,), (64,), (256,), (1024,), (1024, "sliced")]}


def table(op, device):
    """The sizes of the table: [Case]. The clamped form is timed on CPUs alone."""
    if device == "gpu" and op == "swiglu_weighted_clamp_bwd":
        return []
    if op.startswith("swiglu"):
        return _swiglu(op, _SWIGLU_GPU if device == "gpu" else _SWIGLU_CPU)
    return _norm(op, _NORM_GPU if device == "gpu" else _NORM_CPU)


def sweep(op, device):
    """From 8 rows to 2^20 by fours, on a CPU up to 1.5 GiB of traffic: [Case]."""
    if device == "gpu" and op == "swiglu_weighted_clamp_bwd":
        return []
    rows = [*(2**k for k in range(3, 20, 2)), 2**20]
    cases = _swiglu(op, [(n, _SWEEP_COLUMNS) for n in rows]) if op.startswith("swiglu") else _norm(op, [(n,) for n in rows])
    return [case for case in cases if device == "gpu" or case.bytes <= 3 * 2**29]


def quick(op, device):
    """Small sizes, for a test of the tool: [Case]."""
    return (_swiglu if op.startswith("swiglu") else _norm)(op, _QUICK[op.startswith("swiglu")])
