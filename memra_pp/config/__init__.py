"""Model configs: per-layer plans, read from Hugging Face configs and GGUF metadata, and the fences that cut them."""

from .fence import Fence, check_fence, even_fence, fence_from_cuts, fence_from_env, stage_layers
from .forwards import has_reference_forward
from .model import KvPlan, LayerPlan, ModelConfig, RecurrentPlan, SharedKvPlan
from .weight_bytes import WeightBytes, estimate_weight_bytes, read_weight_bytes

__all__ = [
    "Fence",
    "KvPlan",
    "LayerPlan",
    "ModelConfig",
    "RecurrentPlan",
    "SharedKvPlan",
    "WeightBytes",
    "check_fence",
    "estimate_weight_bytes",
    "even_fence",
    "fence_from_cuts",
    "fence_from_env",
    "has_reference_forward",
    "read_weight_bytes",
    "stage_layers",
]
