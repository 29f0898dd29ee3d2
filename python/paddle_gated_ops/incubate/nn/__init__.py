"""Named as paddle.incubate.nn is."""

from . import functional

__all__ = ["functional"]
