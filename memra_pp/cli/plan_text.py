"""A plan as a person reads it: how many fit, the stages of the cuts, what fills the devices, what limits them, what helps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from textwrap import fill

from ..admission import CutPlan, Plan, StagePlan
from ..admission.shape import slack_rows
from ..config import KvPlan, has_reference_forward
from .advice import Advice, Alternative, lacks, open_doors
from .options import spelled, spelled_devices
from .table import beside, columns, human

WIDTH = 100
BAR_WIDTH = 36
MOST_ROWS = 12
"""With more stages, those between the ends that are alike are one row."""

MOST_CUTS = 80
"""Characters of a cut that is written out."""


def plan_text(plan: Plan, helps: Advice) -> str:
    """The whole answer, at most `WIDTH` columns wide."""
    cuts = _cuts(plan)
    parts = [
        _question(plan),
        _answer(plan, helps),
        _stages(plan, cuts),
        _bars(plan),
        _limits(plan, cuts),
        _changes(plan, cuts, helps.alternatives),
    ]
    return "\n\n".join(parts)


def _cuts(plan: Plan) -> Mapping[str, CutPlan]:
    """The cuts to show by their names, the one that others are measured by first."""
    name = "one stage" if len(plan.base.stages) == 1 else "your cut" if plan.given else "even cut"
    return {name: plan.base} if plan.base.fence == plan.best.fence else {name: plan.base, _best_name(plan): plan.best}


def _best_name(plan: Plan) -> str:
    return "least short" if plan.best.sessions == 0 else "best cut"


# What was asked


def _question(plan: Plan) -> str:
    cfg, shape, weights = plan.setup.cfg, plan.setup.shape, plan.setup.weights
    mtp = f" + {cfg.n_layer - cfg.n_trunk} MTP" if cfg.n_layer > cfg.n_trunk else ""
    slack = f"{slack_rows(shape.speculate)} of slack"
    if not shape.speculate:
        slack += f" ({slack_rows(1)} when speculating)"
    drafts = f", {_count(shape.speculate, 'draft')} a round ({shape.recurrent})" if shape.speculate else ""
    tied = "; tied head, held on both ends" if weights.tied and len(plan.setup.devices) > 1 else ""
    lines = [
        f"{cfg.arch}, {cfg.n_trunk}{mtp} layers, on {_count(len(plan.setup.devices), 'device')}",
        f"a session: {_count(shape.ctx, 'row')}: prompt, new tokens and {slack}; {_count(shape.snapshots, 'snapshot')}{drafts}",
        f"K/V {_formats(plan)}; rings {_rings(plan)}",
        f"{'~ weights ' if weights.estimated else 'weights: '}{weights.source}{tied}",
    ]
    if not has_reference_forward(cfg):
        lines.append("to run it, launch with a StageModel of your own: there is no reference forward for it")
    return "\n".join(map(_wrapped, lines))


def _formats(plan: Plan) -> str:
    """The formats in force and, where they differ, on how many layers; the switches that override those given."""
    cfg, policy = plan.setup.cfg, plan.setup.policy
    held = Counter("/".join(policy.formats(layer)) for layer in cfg.layers if isinstance(layer, KvPlan))
    doors = ", ".join(open_doors(cfg, policy).values())
    said = {formats: formats + (f" by {doors}" if doors and formats == "fp8/fp8" else "") for formats in held}
    if len(held) < 2:
        return ", ".join(said.values()) or "none"
    return ", ".join(f"{said[formats]} on {_count(n, 'layer')}" for formats, n in held.items())


def _rings(plan: Plan) -> str:
    cfg, policy = plan.setup.cfg, plan.setup.policy
    if policy.ring == "off":
        return "off"
    ringed = sum(policy.ringed(layer) for layer in cfg.layers if isinstance(layer, KvPlan))
    return f"{policy.ring}: {ringed} of {_count(cfg.n_layer, 'layer')}"


# What fits


def _answer(plan: Plan, helps: Advice) -> str:
    """How many sessions fit and with which cut and, where they are too few, how many devices would do."""
    n, asked, cut = plan.advised.sessions, plan.asked, _with(plan, plan.advised)
    if asked is None or n == 0:
        said = f"{_fits(n)} fit{cut}"
    elif n is None or n >= asked:
        said = f"{asked:,} fit{cut} (at most {_fits(n)})"
    else:
        said = f"{asked:,} do not fit: {n:,} do{cut}"
    lines = [said + _others(plan)]
    if lacks(plan):
        lines.append(_purchase(_count(asked or 1, "session"), plan.setup.devices[-1].budget, helps.devices_needed))
    return "\n".join(map(_wrapped, lines))


def _purchase(wanted: str, memory: int, needed: int | None) -> str:
    if needed is None:
        return f"no number of devices of {spelled(memory)} holds {wanted}"
    return f"the fewest devices of {spelled(memory)} that hold {wanted}: --devices {spelled_devices([memory] * needed)}"


def _with(plan: Plan, cut: CutPlan) -> str:
    if len(cut.stages) == 1:
        return ""
    return f" with {_cut_option(cut)}{', the least short' if cut.fence == plan.best.fence and cut.sessions == 0 else ''}"


def _others(plan: Plan) -> str:
    """What the even cut holds, or instead of the one that was asked for, the best one."""
    if plan.advised.sessions != plan.best.sessions:
        return f"; {_cut_option(plan.best)} holds {_fits(plan.best.sessions)}"
    return f"; the even cut holds {_fits(plan.even.sessions)}" if plan.even.sessions != plan.best.sessions else ""


def _cut_option(cut: CutPlan) -> str:
    """The option for a cut; of very many stages its ends."""
    said = ",".join(map(str, cut.fence[1:-1]))
    if len(said) > MOST_CUTS:
        said = f"{cut.fence[1]},{cut.fence[2]},...,{cut.fence[-2]} (all of them with --json)"
    return f"--cuts {said}"


def _stages(plan: Plan, cuts: Mapping[str, CutPlan]) -> str:
    runs = _runs([*cuts.values()])
    where = columns(("stage", "memory"), *((_span(run), human(plan.base.stages[run[0]].memory_bytes)) for run in runs))
    blocks = [_stages_of(name, cut, runs, "~" * plan.setup.weights.estimated) for name, cut in cuts.items()]
    cut = f"the {_best_name(plan)}: {_cut_option(plan.best)}" if len(cuts) > 1 else "no cut lets more fit"
    return "\n".join([*beside(["", *where], *blocks), _wrapped(f"* the stage that binds; {cut}")])


def _stages_of(name: str, cut: CutPlan, runs: Sequence[range], mark: str) -> list[str]:
    rows = [
        (
            _span(range(cut.stages[run[0]].layers.start, cut.stages[run[-1]].layers.stop)),
            mark + human(cut.stages[run[0]].weight_bytes),
            human(cut.stages[run[0]].session_bytes),
            _fits(cut.stages[run[0]].sessions) + (" *" if cut.binding in run else "  "),
        )
        for run in runs
    ]
    return [f"{name}: {_fits(cut.sessions)} fit", *columns(("layers", "weights", "a session", "fit  "), *rows)]


def _runs(cuts: Sequence[CutPlan]) -> list[range]:
    """The stages of a row each: one, or with many stages all of a run that are alike, the ends apart."""
    stages = len(cuts[0].stages)

    def alike(s: int) -> object:
        if stages <= MOST_ROWS or s in (0, stages - 1):
            return s
        of_each = [cut.stages[s] for cut in cuts]
        return [(x.memory_bytes, len(x.layers), x.weight_bytes, x.session_bytes, x.workspace_bytes) for x in of_each]

    runs = [[*run] for _, run in groupby(range(stages), alike)]
    return [range(run[0], run[-1] + 1) for run in runs]


def _span(span: range) -> str:
    """Stages or layers, as from the first to the last; one stage is its number."""
    return f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0])


# What the devices are full of


def _bars(plan: Plan) -> str:
    """A line a device, filled with the sessions that were asked for, else with those that fit."""
    cut = plan.advised
    name = next(name for name, shown in _cuts(plan).items() if shown.fence == cut.fence)
    held = max(1, cut.sessions or 0) if plan.asked is None else plan.asked
    header = ("stage", f"{name}, {_count(held, 'session')}", "w weights", "r workspace and reserve", "# cache", ". free")
    rows = [
        (
            _span(run),
            _bar(stage),
            human(stage.weight_bytes),
            human(stage.kept_bytes),
            human(stage.room_bytes - stage.free_bytes),
            human(stage.free_bytes),
        )
        for run in _runs([cut])
        for stage in [cut.stages[run[0]]]
    ]
    return "\n".join(columns(header, *rows, left=(1,)))


def _bar(stage: StagePlan) -> str:
    """The device to scale; `>` at the end of one that is too full."""
    bar, end = "", 0
    for mark, nbytes in zip("wr#", (stage.weight_bytes, stage.kept_bytes, stage.room_bytes - stage.free_bytes), strict=True):
        end += nbytes
        bar += mark * (min(BAR_WIDTH, round(BAR_WIDTH * end / stage.memory_bytes)) - len(bar))
    return bar[: BAR_WIDTH - 1] + ">" if stage.free_bytes < 0 else bar.ljust(BAR_WIDTH, ".")


def _limits(plan: Plan, cuts: Mapping[str, CutPlan]) -> str:
    """What is short for what was asked, the stage that binds, and what it is full of."""
    cut = plan.advised
    if cut.sessions is None:
        return "Any number of sessions fits: no stage keeps anything of one."
    stage = cut.stages[cut.binding]
    left = f", so {human(stage.room_bytes)} are left for sessions of {human(stage.session_bytes)}"
    if stage.room_bytes < 0:
        left = f", {human(-stage.room_bytes)} more than there is"
    said = [
        f"Stage {stage.stage} binds, by its {stage.bound_by}: of {human(stage.memory_bytes)}, weights take "
        f"{human(stage.weight_bytes)} and {human(stage.kept_bytes)} are kept for workspace and reserve{left}."
    ]
    if (plan.asked or 0 in [shown.sessions for shown in cuts.values()]) and any(shown.shortest for shown in cuts.values()):
        wanted = f"For {_count(plan.asked or 1, 'session')}"
        said = [f"{wanted}: {'; '.join(_whether(name, shown) for name, shown in cuts.items())}.", *said]
    return "\n".join(map(_wrapped, said))


def _whether(name: str, cut: CutPlan) -> str:
    short = cut.shortest
    if short is None:
        return f"{name} has room"
    return f"{name} is {human(-short.free_bytes)} ({-short.free_bytes:,} bytes) short on stage {short.stage}"


# What helps


def _changes(plan: Plan, cuts: Mapping[str, CutPlan], better: Sequence[Alternative]) -> str:
    rows = [("as it is", _fits(plan.base.sessions), _fits(plan.best.sessions))]
    for other in better:
        same = plan.given is None or other.plan.given is not None
        rows.append((other.change, _fits(other.plan.base.sessions) if same else "-", _fits(other.plan.best.sessions)))
    table = columns(("sessions that fit with", next(iter(cuts)), "best cut"), *rows, left=(0,))
    return "\n".join(table if better else [*table, "nothing else helps"])


def _fits(sessions: int | None) -> str:
    return "any" if sessions is None else f"{sessions:,}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _wrapped(text: str) -> str:
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
