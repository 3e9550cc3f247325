"""The hyper-parameters that a forward needs, under one spelling, whatever file and library version they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .families import FULL, LINEAR, SLIDING
from .fields import Fields
from .model import KvPlan, LayerPlan, RecurrentPlan, SharedKvPlan


def normalise(f: Fields, layers: Sequence[LayerPlan]) -> dict[str, Any]:
    """The raw config with `layer_types` (one entry a layer, MTP blocks included), `rms_norm_eps`, `tie_word_embeddings`
    and the rotary keys of `rope` filled in.

    Raises:
        ConfigError: a value of the wrong type or range.
    """
    return {
        **f.raw,
        "layer_types": [_kind(layers, il) for il in range(len(layers))],
        "rms_norm_eps": f.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": f.flag("tie_word_embeddings"),
        **rope(f),
    }


def rope(f: Fields) -> dict[str, Any]:
    """Rotary embedding: `rope_theta`, `rope_type`, `rope_scaling_factor` (the factor of type `linear`, else 1.0),
    `partial_rotary_factor`, and `rope_local_base_freq` where windowed layers have a base of their own.

    `rope_parameters` (flat, or one object a layer kind) goes before the older keys `rope_theta`, `rope_local_base_freq`
    and `rope_scaling`. A `rope_theta` that lists one base a layer (Step) is kept as it is.
    """
    name = "rope_parameters" if f.given("rope_parameters") else "rope_scaling"
    given = f.inside(name)
    nested = any(isinstance(given.raw.get(kind), Mapping) for kind in (FULL, SLIDING))
    full, local = (given.inside(FULL), given.inside(SLIDING)) if nested else (given, None)

    kind = full.raw.get("rope_type", full.raw.get("type")) or "default"
    if not isinstance(kind, str):
        raise full.bad("rope_type", "a name such as default or linear")
    if kind == "linear" and not full.given("factor"):
        raise full.refuse("rope_type is linear and factor is missing; give the factor")
    out: dict[str, Any] = {
        "rope_theta": _theta(f, full),
        "rope_type": kind,
        "rope_scaling_factor": full.number("factor", 1.0) if kind == "linear" else 1.0,
        "partial_rotary_factor": full.number("partial_rotary_factor", f.number("partial_rotary_factor", 1.0)),
    }
    if local is not None and local.given("rope_theta"):
        out["rope_local_base_freq"] = local.number("rope_theta", 1e4)
    elif f.given("rope_local_base_freq"):
        out["rope_local_base_freq"] = f.number("rope_local_base_freq", 1e4)
    return out


def _theta(f: Fields, full: Fields) -> float | list[Any]:
    if full.given("rope_theta"):
        return full.number("rope_theta", 1e4)
    listed = f.raw.get("rope_theta")
    return list(listed) if isinstance(listed, (list, tuple)) else f.number("rope_theta", 1e4)


def _kind(layers: Sequence[LayerPlan], il: int) -> str:
    match layers[il]:
        case KvPlan(window=None):
            return FULL
        case KvPlan():
            return SLIDING
        case RecurrentPlan():
            return LINEAR
        case SharedKvPlan(source=source):
            return _kind(layers, source)
