"""Named as paddle.incubate.nn is: the layers here, the functions in ``functional``."""

from . import functional
from .layer import RMSNormSiLUGate, WeightedSwiGLUExperts

__all__ = ["RMSNormSiLUGate", "WeightedSwiGLUExperts", "functional"]
