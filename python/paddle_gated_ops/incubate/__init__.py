"""Named as paddle.incubate is."""

from . import nn

__all__ = ["nn"]
