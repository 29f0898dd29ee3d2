"""Other libraries' versions of the ops, each timed in a process of its own by a Python that has it, without Paddle.

A module here is a peer. It has functions(device), which returns {op: function of the inputs by name, as tensors, returning
a tuple of the outputs}, and raises ImportError where the library is not installed; and PACKAGES, whose versions are noted.
It may have prepare(op, inputs), which returns the inputs to time with; forget(), after which the next case gets code and
choices of its own; and, of a peer that does less than the op, OUTPUTS (their names), PROBS (the probability it computes
with) and BYTES (of an element).
"""

from typing import NamedTuple

from ..cases import OPS


class Peer(NamedTuple):
    """A module's name in the records, and the ops that it has."""

    name: str
    ops: tuple


#: By module.
PEERS = {
    "torch_compile": Peer("torch.compile", OPS),
    "fla": Peer("FLA rms_norm_gated", ("rmsnorm_silu_gate_bwd", "rmsnorm_silu_gate")),
    "liger": Peer("Liger SwiGLU (do1 alone)", ("swiglu_weighted_bwd",)),
}
