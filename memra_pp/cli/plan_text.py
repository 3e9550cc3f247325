"""A plan as a person reads it: the stages of both cuts, what fills the devices, what limits them, what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill

from ..admission import CutPlan, Plan, StagePlan
from ..config import KvPlan
from .advice import Alternative
from .table import beside, columns, human

WIDTH = 100
BAR_WIDTH = 40


def plan_text(plan: Plan, better: Sequence[Alternative]) -> str:
    """The whole answer, at most `WIDTH` columns wide."""
    cuts = _cuts(plan)
    parts = [
        _question(plan),
        _stages(plan, cuts),
        _bars(plan, next(iter(cuts))),
        _limits(plan, cuts),
        _changes(plan, cuts, better),
    ]
    return "\n\n".join(parts)


def _cuts(plan: Plan) -> Mapping[str, CutPlan]:
    """The cuts to show by their names, the one that others are measured by first."""
    name = "one stage" if len(plan.base.stages) == 1 else "your cut" if plan.given else "even cut"
    return {name: plan.base} if plan.base.fence == plan.best.fence else {name: plan.base, "best cut": plan.best}


def _question(plan: Plan) -> str:
    cfg, shape, policy = plan.setup.cfg, plan.setup.shape, plan.setup.policy
    mtp = f" + {cfg.n_layer - cfg.n_trunk} MTP" if cfg.n_layer > cfg.n_trunk else ""
    formats = sorted({"/".join(policy.formats(layer)) for layer in cfg.layers if isinstance(layer, KvPlan)})
    drafts = f", {_count(shape.speculate, 'draft')} a round ({shape.recurrent})" if shape.speculate else ""
    lines = [
        f"{cfg.arch}, {cfg.n_trunk}{mtp} layers, on {_count(len(plan.setup.devices), 'device')}",
        f"a session: {_count(shape.ctx, 'row')}, {_count(shape.snapshots, 'snapshot')}{drafts}; "
        f"K/V {', '.join(formats) or 'none'}, rings {policy.ring}",
        f"{'~ weights ' if plan.setup.weights.estimated else 'weights: '}{plan.setup.weights.source}",
    ]
    return "\n".join(map(_wrapped, lines))


def _stages(plan: Plan, cuts: Mapping[str, CutPlan]) -> str:
    where = columns(("stage", "memory"), *((str(s.stage), human(s.memory_bytes)) for s in plan.base.stages))
    blocks = [_stages_of(name, cut, "~" * plan.setup.weights.estimated) for name, cut in cuts.items()]
    cut = f"the best cut: --cuts {','.join(map(str, plan.best.fence[1:-1]))}" if len(cuts) > 1 else "no cut lets more fit"
    return "\n".join([*beside(["", *where], *blocks), _wrapped(f"* the stage that binds; {cut}")])


def _stages_of(name: str, cut: CutPlan, mark: str) -> list[str]:
    rows = [
        (
            f"{stage.layers.start}-{stage.layers.stop - 1}",
            mark + human(stage.weight_bytes),
            human(stage.session_bytes),
            _fits(stage.sessions) + (" *" if stage.stage == cut.binding else "  "),
        )
        for stage in cut.stages
    ]
    return [f"{name}: {_fits(cut.sessions)} fit", *columns(("layers", "weights", "a session", "fit  "), *rows)]


def _bars(plan: Plan, name: str) -> str:
    """A line a device, filled with the sessions that were asked for, else with those that fit."""
    held = max(1, plan.base.sessions or 0) if plan.asked is None else plan.asked
    header = ("stage", f"{name}, {_count(held, 'session')}", "w weights", "r reserve", "# cache", ". free")
    rows = [
        (
            str(stage.stage),
            _bar(stage),
            human(stage.weight_bytes),
            human(stage.reserve_bytes + stage.workspace_bytes),
            human(stage.room_bytes - stage.free_bytes),
            human(stage.free_bytes),
        )
        for stage in plan.base.stages
    ]
    return "\n".join(columns(header, *rows, left=(1,)))


def _bar(stage: StagePlan) -> str:
    taken = stage.weight_bytes, stage.reserve_bytes + stage.workspace_bytes, stage.room_bytes - stage.free_bytes
    bar, end = "", 0
    for mark, nbytes in zip("wr#", taken, strict=True):
        end += nbytes
        bar += mark * (min(BAR_WIDTH, round(BAR_WIDTH * end / stage.memory_bytes)) - len(bar))
    return bar.ljust(BAR_WIDTH, ".")


def _limits(plan: Plan, cuts: Mapping[str, CutPlan]) -> str:
    """Whether what was asked for fits, the stage that binds, and what it is full of."""
    base = plan.base
    if base.sessions is None:
        return "Any number of sessions fits: no stage keeps anything of one."
    stage = base.stages[base.binding]
    left = f", so {human(stage.room_bytes)} are left for sessions of {human(stage.session_bytes)}"
    if stage.room_bytes < 0:
        left = f", {human(-stage.room_bytes)} more than there is"
    said = [
        f"Stage {stage.stage} binds, by its {stage.bound_by}: of {human(stage.memory_bytes)}, weights take "
        f"{human(stage.weight_bytes)} and {human(stage.reserve_bytes + stage.workspace_bytes)} are kept for workspace and "
        f"reserve{left}."
    ]
    if plan.asked is not None or base.sessions == 0:
        wanted = f"For {_count(plan.asked or 1, 'session')}"
        said = [f"{wanted}: {'; '.join(_whether(name, cut) for name, cut in cuts.items())}.", *said]
    return "\n".join(map(_wrapped, said))


def _whether(name: str, cut: CutPlan) -> str:
    short = cut.shortest
    if short is None:
        return f"{name} has room"
    return f"{name} is {human(-short.free_bytes)} ({-short.free_bytes:,} bytes) short on stage {short.stage}"


def _changes(plan: Plan, cuts: Mapping[str, CutPlan], better: Sequence[Alternative]) -> str:
    rows = [("as it is", _fits(plan.base.sessions), _fits(plan.best.sessions))]
    for other in better:
        same = plan.given is None or other.plan.given is not None
        rows.append((other.change, _fits(other.plan.base.sessions) if same else "", _fits(other.plan.best.sessions)))
    return "\n".join(columns(("sessions that fit with", next(iter(cuts)), "best cut"), *rows, left=(0,)))


def _fits(sessions: int | None) -> str:
    return "any" if sessions is None else f"{sessions:,}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _wrapped(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
