"""Model configs: per-layer plans, read from Hugging Face config files and GGUF metadata."""

from .model import KvPlan, LayerPlan, ModelConfig, RecurrentPlan, SharedKvPlan

__all__ = ["KvPlan", "LayerPlan", "ModelConfig", "RecurrentPlan", "SharedKvPlan"]
