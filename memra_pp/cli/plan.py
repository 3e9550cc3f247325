"""`memra-pp plan`: how many sessions fit on devices that nobody needs to have, what limits them and what helps."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from .. import admission
from ..admission import CutPlan, Plan
from ..admission.planner import RESERVE_BYTES
from ..config import ModelConfig, WeightBytes, has_reference_forward, read_weight_bytes
from ..config.fence import fence_from_cuts
from ..errors import ConfigError
from .advice import Advice, advice
from .options import policy
from .plan_text import plan_text


def plan(args: argparse.Namespace) -> None:
    """Plans, and prints it."""
    cfg = ModelConfig.from_path(args.model)
    cfg = cfg.without_mtp() if args.no_mtp else cfg
    planned = admission.plan(
        cfg,
        args.devices,
        args.ctx,
        args.sessions,
        policy(args),
        weights=_weights(args, cfg),
        snapshots=args.snapshots,
        recurrent=args.recurrent,
        speculate=args.speculate,
        fence=None if args.cuts is None else fence_from_cuts(cfg, args.cuts),
        reserve=RESERVE_BYTES if args.reserve is None else args.reserve,
    )
    helps = advice(planned)
    print(json.dumps(plan_json(planned, helps)) if args.json else plan_text(planned, helps))


def _weights(args: argparse.Namespace, cfg: ModelConfig) -> WeightBytes:
    try:
        given: WeightBytes = read_weight_bytes(args.model, cfg) if args.weights is None else args.weights(cfg)
        return given
    except ConfigError as error:
        raise ConfigError(f"{error}; or say what the weights take, such as --weights 40GiB") from error


def plan_json(plan: Plan, helps: Advice) -> dict[str, Any]:
    """Everything, sizes in bytes; `sessions` of null are any number."""
    setup = plan.setup
    return {
        "model": setup.cfg.arch,
        "layers": setup.cfg.n_layer,
        "reference_forward": has_reference_forward(setup.cfg),
        "mtp_layers": setup.cfg.n_layer - setup.cfg.n_trunk,
        "session": asdict(setup.shape),
        "policy": asdict(setup.policy),
        "weights": {"estimated": setup.weights.estimated, "source": setup.weights.source},
        "sessions_asked": plan.asked,
        "given": plan.given and _cut_json(plan.given),
        "even": _cut_json(plan.even),
        "best": _cut_json(plan.best),
        "devices_needed": helps.devices_needed,
        "alternatives": [
            {
                "change": a.change,
                "given_sessions": a.plan.given and a.plan.given.sessions,
                "even_sessions": a.plan.even.sessions,
                "best_sessions": a.plan.best.sessions,
                "best_cuts": a.plan.best.fence[1:-1],
            }
            for a in helps.alternatives
        ],
    }


def _cut_json(cut: CutPlan) -> dict[str, Any]:
    stages = [
        {
            **asdict(stage),
            "layers": [stage.layers.start, stage.layers.stop],
            "padding_bytes": stage.padding_bytes,
            "bound_by": stage.bound_by,
        }
        for stage in cut.stages
    ]
    return {"cuts": cut.fence[1:-1], "sessions": cut.sessions, "binding_stage": cut.binding, "stages": stages}
