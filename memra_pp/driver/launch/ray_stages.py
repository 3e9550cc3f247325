"""The Ray backend: places one actor a stage, wires the lanes between them, and replaces those that die."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...admission import Device, pooled
from ...errors import ConfigError, LaneError, MemraError, StageError
from ...kernels.devices import require_gpus
from ...models.protocol import StageModel
from ...stage.actor import Place, StageActor, kill_process, node_ip
from ...stage.lanes import Lane
from ...stage.listener import KEY_BYTES, Listener, connect
from ...stage.spec import StageSpec
from ..chain import Progress
from ..lane_chain import Ends, LaneChain, Recovery
from .cut import Refence, refenced
from .ray_placement import Placement
from .ray_runtime import STOP_S, deferred_signals, private_dir, remove_dir, runtime, wait_for_exit

START_S = 120.0
LOAD_S = 900.0
WIRE_S = 60.0
DRAIN_S = 10.0
"""How long a stage whose lanes broke may take to end the step it is at; then it is taken for hung."""
FREED_S = 120.0
"""How long a lost stage's bundle may take to be free again, or on another node: Ray gives a node up after a minute, unless its
`health_check_*` settings say less."""
KILL_S = 10.0
SLICE_S = 0.2

log = logging.getLogger(__name__)


def launch_ray(
    specs: Sequence[StageSpec],
    model: type[StageModel],
    by_memory: Refence | None,
    recovery: Recovery,
    placement_s: float,
    progress: Progress,
) -> LaneChain:
    """Starts one actor a stage, cuts the model by what their devices have free (`by_memory`), loads the stages in parallel and
    wires them into a chain.

    Raises:
        ConfigError: the weights cannot be used, or the cluster has no room for the stages within `placement_s` seconds.
        StageError: a stage did not start in time; nothing is left running.
    """
    if not (ray.is_initialized() or os.environ.get("RAY_ADDRESS")):
        require_gpus([spec.device for spec in specs])  # of this machine: the one node of the Ray that is started then
    stages = RayStages(specs, model, progress)
    try:
        return stages.launch(recovery, by_memory, placement_s)
    except BaseException:
        stages.close()
        raise


@dataclass
class _Stage:
    """A stage's actor and where it is, once it is started, and its long task, while it serves."""

    spec: StageSpec
    actor: Any = None
    place: Place | None = None
    serving: Any = None

    @property
    def here(self) -> bool:
        """Whether it is on the driver's node."""
        return self.place is not None and self.place.node == _this_node()


class RayStages:
    """The actors of a pipeline, and what has to be undone when it closes."""

    def __init__(self, specs: Sequence[StageSpec], model: type[StageModel], progress: Progress) -> None:
        self._stages = [_Stage(spec) for spec in specs]
        self._model = model
        self._progress = progress
        self._key = secrets.token_bytes(KEY_BYTES)
        self._dir = private_dir()
        self._lanes: list[Lane] = []
        self._listener: Listener | None = None
        self._acquired = False
        self._placement: Placement | None = None
        self._devices: Sequence[Device] = ()
        self._homes: Sequence[int] = ()
        self._unwanted: Callable[[], bool] = lambda: False

    def launch(self, recovery: Recovery, by_memory: Refence | None, placement_s: float) -> LaneChain:
        """The chain, wired for the first time."""
        self._progress("starting Ray", 0, self._steps)
        with deferred_signals():
            runtime.acquire(len(self._stages))
            self._acquired = True
        self._place(placement_s)
        self._cut(by_memory)
        self._load(self._stages)
        self._devices, self._homes = pooled(self._results([stage.actor.share.remote() for stage in self._stages], WIRE_S))
        self._reserve(self._stages)
        self._progress("wiring the stages", self._steps - 1, self._steps)
        ends = self._wire(1)
        specs = [stage.spec for stage in self._stages]
        self._progress = _nothing
        return LaneChain(
            specs, self._devices, self._homes, ends, self.autopsy, self.close, recovery=recovery, rewire=self.rewire
        )

    def rewire(self, epoch: int, silent: Collection[int], unwanted: Callable[[], bool]) -> tuple[Ends, str]:
        """Replaces the stages that are gone, and `silent` ones, and wires all of them anew; what was replaced, and why.

        Raises:
            StageError: one of them is lost meanwhile, or `unwanted` says that this is for nothing.
            ConfigError: the cluster has no room for a replacement.
        """
        self._unwanted = unwanted
        self._drop_lanes()
        if not ray.is_initialized():  # whatever is asked of it now would start another
            raise ConfigError("the Ray of this pipeline was shut down: launch it again")
        why = self._end_lost(silent)
        missing = [stage for stage in self._stages if stage.actor is None]
        self._replace(missing)
        self._load(missing)
        self._reserve(missing)
        return self._wire(epoch), "; ".join(why) or "its lanes broke, and no stage was lost"

    def autopsy(self) -> str | None:
        """Which stage's serving ended, and why: the first that did not merely lose its neighbour."""
        if not ray.is_initialized():
            return None
        serving = [stage for stage in self._stages if stage.serving is not None]
        ended, _ = ray.wait([s.serving for s in serving], num_returns=len(serving), timeout=0)
        return next((why for stage in serving if stage.serving in ended and (why := _cause(stage)) is not None), None)

    def close(self) -> None:
        """Ends the actors and everything started for them, also when Ray was shut down under them."""
        self._drop_lanes()
        try:
            if self._acquired and ray.is_initialized():
                self._end_actors()
                if self._placement is not None:
                    self._placement.remove()
        finally:
            with deferred_signals():
                if self._acquired:
                    self._acquired = False
                    runtime.release()
                remove_dir(self._dir)

    @property
    def _steps(self) -> int:
        return len(self._stages) + 2

    def _drop_lanes(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._lanes.clear()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def _end_lost(self, silent: Collection[int]) -> list[str]:
        """Ends the actors that are lost: silent ones, those that failed, and those that do not end what they are at; why."""
        why: list[str] = []
        for stage in [self._stages[s] for s in silent]:
            why.append(f"{stage.spec} on {stage.spec.device} fell silent")
            self._kill(stage)
        living = [stage for stage in self._stages if stage.actor is not None]
        asked = {id(stage): stage.actor.where.remote() for stage in living}
        answered, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=DRAIN_S)
        for stage in living:
            cause = _cause(stage) if asked[id(stage)] in answered else f"{stage.spec} hangs"
            if cause is None:
                cause = _error_of(asked[id(stage)], stage)
            if cause is not None:
                why.append(f"{cause} (device {stage.spec.device})")
                self._kill(stage)
            stage.serving = None
        return why

    def _kill(self, stage: _Stage) -> None:
        """Ends an actor, be it a stopped one."""
        place, here, actor = stage.place, stage.here, stage.actor
        stage.actor = stage.place = stage.serving = None
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
        if place is not None and here:
            wait_for_exit([place.pid], 0.0)
        elif place is not None:
            _kill_far([place])

    def _end_actors(self) -> None:
        """Ends the actors and waits until this node's are gone; one that will not go (a stopped one, say) is killed."""
        pids = [stage.place.pid for stage in self._stages if stage.place is not None and stage.here]
        with contextlib.suppress(RayError, ValueError):  # a ValueError: these references are of a Ray that was shut down
            serving = [stage.serving for stage in self._stages if stage.serving is not None]
            hanging = ray.wait(serving, num_returns=len(serving), timeout=STOP_S)[1] if serving else []
            _kill_far([s.place for s in self._stages if s.place is not None and s.serving in hanging and not s.here])
            for stage in self._stages:
                if stage.actor is not None:
                    ray.kill(stage.actor, no_restart=True)
        wait_for_exit(pids, STOP_S)

    def _place(self, patience_s: float) -> None:
        """Starts every actor, and has stages that follow each other share nodes as far as they can."""
        self._placement = Placement([stage.spec.device for stage in self._stages])
        self._start(self._stages, patience_s)
        actors, places = [stage.actor for stage in self._stages], [_placed(stage) for stage in self._stages]
        for stage, taken in zip(self._stages, self._placement.arrange(places, _this_node()), strict=True):
            stage.actor, stage.place = actors[taken], places[taken]

    def _cut(self, by_memory: Refence | None) -> None:
        """Tells the stages what part of their nodes is theirs, and where the model is cut."""
        places = [_placed(stage) for stage in self._stages]
        neighbours = Counter(place.node for place in places)
        specs = [
            stage.spec.among(neighbours[place.node], place.cores, place.node)
            for stage, place in zip(self._stages, places, strict=True)
        ]
        free: Sequence[int] = ()
        if by_memory is not None:
            free = self._results([stage.actor.free_bytes.remote(stage.spec.device) for stage in self._stages], WIRE_S)
        for stage, spec in zip(self._stages, refenced(specs, free, by_memory), strict=True):
            stage.spec = spec

    def _replace(self, lost: Sequence[_Stage]) -> None:
        """Starts actors in the place of lost ones. Ray may know only then that their node is gone."""
        try:
            self._start(lost, FREED_S)
        except StageError as error:
            self._require_wanted()
            log.warning("%s: starting it once more", error)
            for stage in lost:
                self._kill(stage)
            self._start(lost, FREED_S)
        for stage in lost:
            stage.spec = replace(stage.spec, node=_placed(stage).node)

    def _start(self, stages: Sequence[_Stage], patience_s: float) -> None:
        """Starts the actors of some stages, each in its bundle."""
        if self._placement is None or not stages:
            return
        self._placement.wait(patience_s, self._require_wanted)
        actor_class: Any = StageActor
        for stage in stages:
            stage.actor = actor_class.options(**self._placement.options(stage.spec.stage)).remote(self._key)
        places = self._results([stage.actor.where.remote() for stage in stages], START_S)
        for stage, place in zip(stages, places, strict=True):
            stage.place = place

    def _load(self, stages: Sequence[_Stage]) -> None:
        if not stages:
            return
        self._progress("loading stages", 1, self._steps)

        def loaded(done: int) -> None:
            self._progress(f"loaded {done} of {len(stages)} stages", 1 + done, self._steps)

        self._results([stage.actor.load.remote(stage.spec, self._model) for stage in stages], LOAD_S, loaded)

    def _reserve(self, stages: Sequence[_Stage]) -> None:
        budgets = [self._devices[self._homes[stage.spec.stage]].budget for stage in stages]
        self._results([stage.actor.reserve.remote(n) for stage, n in zip(stages, budgets, strict=True)], WIRE_S)

    def _wire(self, epoch: int) -> Ends:
        """Lanes from stage to stage, and the driver's ends of them."""
        stages, names = self._stages, [str(stage.spec) for stage in self._stages]
        self._listener = Listener(self._address(f"driver-{epoch}", stages[-1].here, node_ip()), self._key)
        near = [all(other.here for other in stages[max(0, s - 1) : s + 1]) for s in range(len(stages))]
        listening = [
            self._address(f"stage{stage.spec.stage}-{epoch}", close, _placed(stage).ip)
            for stage, close in zip(stages, near, strict=True)
        ]
        heard = self._results([s.actor.listen.remote(at) for s, at in zip(stages, listening, strict=True)], WIRE_S)
        addresses, offers = zip(*heard, strict=True)
        ends = zip(
            stages, [*addresses[1:], self._listener.address], [*names[1:], "the driver"], [*offers[1:], None], strict=True
        )
        self._results([stage.actor.wire.remote(*end) for stage, *end in ends], WIRE_S)
        for stage in stages:
            stage.serving = stage.actor.serve.remote(epoch)
        out = self._lane(addresses[0], "frames", names[0])
        control = [self._lane(a, "control", name) for a, name in zip(addresses, names, strict=True)]
        back = self._listener.accept("frames", WIRE_S)
        self._lanes.append(back)
        return Ends(out, back, control)

    def _require_wanted(self) -> None:
        if self._unwanted():
            raise StageError("this pipeline is closed: launch it again")

    def _address(self, name: str, near: bool, ip: str) -> str:
        """A Unix socket for who is connected to from the driver's node alone and is there, else TCP at its node's address."""
        return f"unix:{self._dir}/{name}" if near else f"tcp:{ip}:0"

    def _lane(self, address: str, role: str, peer: str) -> Lane:
        lane = connect(address, role, self._key, WIRE_S, peer)
        self._lanes.append(lane)
        return lane

    def _results(self, refs: list[Any], timeout: float, progress: Callable[[int], None] = lambda done: None) -> list[Any]:
        """The results of Ray calls, with a stage's own error as it was raised there."""
        deadline, waiting = time.monotonic() + timeout, list(refs)
        try:
            while waiting:
                done, waiting = ray.wait(waiting, num_returns=1, timeout=SLICE_S)
                ray.get(done)
                self._require_wanted()
                if done:
                    progress(len(refs) - len(waiting))
                elif time.monotonic() > deadline:
                    raise StageError(
                        f"{len(waiting)} stages were not ready within {timeout:.0f} s: is the cluster full, or a disk slow?"
                    )
            return list(ray.get(refs))
        except RayTaskError as error:
            if isinstance(error.cause, MemraError):
                raise error.cause from None
            raise StageError(f"a stage failed while it started: {error.cause!r}") from error
        except RayError as error:
            first = str(error).partition("\n")[0]
            raise StageError(f"a stage died while it started: {type(error).__name__}: {first}") from error


def _nothing(text: str, done: int, of: int) -> None:
    """Tells nobody: what is replaced later is no launch."""


def _this_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _placed(stage: _Stage) -> Place:
    if stage.place is None:
        raise StageError(f"{stage.spec} has no actor")
    return stage.place


def _kill_far(places: Sequence[Place]) -> None:
    """Kills processes on other nodes, if these live."""
    if places:
        on_node = [NodeAffinitySchedulingStrategy(place.node, soft=False) for place in places]
        killing = [
            kill_process.options(scheduling_strategy=node).remote(place.pid)
            for node, place in zip(on_node, places, strict=True)
        ]
        ray.wait(killing, num_returns=len(killing), timeout=KILL_S)


def _cause(stage: _Stage) -> str | None:
    """Why a stage that has ended its serving is lost; None if it merely lost a neighbour, or does not serve."""
    return None if stage.serving is None else _error_of(stage.serving, stage)


def _error_of(ref: Any, stage: _Stage) -> str | None:
    try:
        ray.get(ref)
    except RayTaskError as error:
        return None if isinstance(error.cause, LaneError) else f"{stage.spec} failed: {error.cause!r}"
    except RayError as error:
        return f"{stage.spec} died: {type(error).__name__}"
    return None
