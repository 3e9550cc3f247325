"""Which models `memra_pp.models` can run, as far as a config says. The others are sized and planned."""

from __future__ import annotations

from collections.abc import Mapping

from .fields import Fields
from .model import ModelConfig
from .weight_estimate import is_sparse

REFERENCE_FORWARDS: Mapping[str, str] = {
    "gemma3": "Gemma3",
    "gemma3_text": "Gemma3",
    "qwen3_next": "Qwen35",
    "qwen3_5": "Qwen35",
    "qwen3_5_text": "Qwen35",
}
"""The name of the class that runs an architecture."""


def has_reference_forward(cfg: ModelConfig) -> bool:
    """Whether there is one for the architecture, and no layer is a mixture of experts. What else a config may ask for that is
    not computed, `memra_pp.models.stage_model_for` says.

    Raises:
        ConfigError: a field that says so is bad.
    """
    return cfg.arch in REFERENCE_FORWARDS and first_sparse(Fields(cfg.arch, cfg.hparams, "the config"), cfg.n_trunk) is None


def first_sparse(f: Fields, n_trunk: int) -> int | None:
    """The first layer that is a mixture of experts.

    Raises:
        ConfigError: a field that says so is bad.
    """
    if not f.given("num_experts"):
        return None
    return next((il for il in range(n_trunk) if is_sparse(f, il)), None)
