"""The layers, on the functions of ``..functional``."""

from .rmsnorm_silu_gate import RMSNormSiLUGate
from .weighted_swiglu_experts import WeightedSwiGLUExperts

__all__ = ["RMSNormSiLUGate", "WeightedSwiGLUExperts"]
