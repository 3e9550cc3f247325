"""memra_pp: the pipeline-parallel cache runtime.

`launch` loads a model onto pipeline stages, one Ray actor each; everything else hangs off the `Pipeline` it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import aio
    from .cache.formats import KvPolicy
    from .config.model import ModelConfig
    from .driver.calls import Round, SessionSnapshot
    from .driver.launch.launch import launch
    from .driver.pipeline import Pipeline
    from .driver.sampling import Sampler, SamplingParams
    from .driver.session import Session
    from .driver.speculation.drafters import Draft
    from .errors import AdmissionError, MemraError, SessionCancelled

__all__ = [
    "AdmissionError",
    "Draft",
    "KvPolicy",
    "MemraError",
    "ModelConfig",
    "Pipeline",
    "Round",
    "Sampler",
    "SamplingParams",
    "Session",
    "SessionCancelled",
    "SessionSnapshot",
    "aio",
    "launch",
]

_HOMES = {
    "AdmissionError": ".errors",
    "Draft": ".driver.speculation.drafters",
    "KvPolicy": ".cache.formats",
    "MemraError": ".errors",
    "ModelConfig": ".config.model",
    "Pipeline": ".driver.pipeline",
    "Round": ".driver.calls",
    "Sampler": ".driver.sampling",
    "SamplingParams": ".driver.sampling",
    "Session": ".driver.session",
    "SessionCancelled": ".errors",
    "SessionSnapshot": ".driver.calls",
    "launch": ".driver.launch.launch",
}


def __getattr__(name: str) -> Any:
    """Loads the driver at first use, so that `memra_pp.config` and `memra_pp.cache` come without it."""
    from importlib import import_module

    if name == "aio":
        return import_module(".aio", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
