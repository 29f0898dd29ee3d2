"""Other libraries' versions of the ops, each timed in a process of its own by a Python that has it, without Paddle.

A module here is a peer. It has NAME and functions(device), which returns {op: function of the inputs by name, as tensors,
returning a tuple of the outputs}, and raises ImportError where the library is not installed. It may have PACKAGES (whose
versions are noted), prepare(op, inputs), which returns the inputs to time with, and, of a peer that does less than the op,
OUTPUTS (their names), PROBS (the probability it computes with) and BYTES (of an element).
"""

PEERS = ("torch_compile", "fla", "liger")
