"""`Placement`: where Ray puts the stages. A placement group with a bundle for every device, on as few nodes as there can be."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...errors import ConfigError
from ...kernels.devices import kind_of
from ...stage.actor import Place

POLL_S = 0.02


class Placement:
    """The bundles of a pipeline's devices. Stages that share a device share its bundle, and so are on one node, and on one GPU.

    A bundle outlives an actor in it; where its node is lost, Ray looks for another. Its CPUs are one a stage.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        """`devices` names the device of every stage."""
        self._devices = list(devices)
        self._stages = Counter(devices)
        names = list(self._stages)
        self._bundle_of = {name: bundle for bundle, name in enumerate(names)}
        self._bundles = [self._bundle(name) for name in names]
        self._group = placement_group(self._bundles, strategy="PACK")

    def wait(self, patience_s: float, require_wanted: Callable[[], None]) -> None:
        """Waits until every bundle is on a node that lives. `require_wanted` raises where this is for nothing.

        Raises:
            ConfigError: that was not within `patience_s` seconds; it names what is needed and what the cluster has.
        """
        deadline = time.monotonic() + patience_s
        while placement_group_table(self._group)["state"] != "CREATED":
            require_wanted()
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{len(self._devices)} stages need {_counted(self._bundles)}, and Ray found no place for them within "
                    f"{patience_s:g} s. It has {_cluster()}. Use fewer stages or other devices, add nodes, or wait longer with "
                    "placement_timeout"
                )
            time.sleep(POLL_S)

    def options(self, stage: int) -> dict[str, Any]:
        """What an actor for a stage asks of Ray."""
        device = self._devices[stage]
        return {
            "num_cpus": 1,
            "num_gpus": 1 / self._stages[device] if kind_of(device) == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, self._bundle_of[device]),
        }

    def arrange(self, places: Sequence[Place], here: str) -> list[int]:
        """Sorts the stages along nodes and GPUs, as far as their bundles are alike: Ray promises no order of either.

        Args:
            places: where the actor is that was started for each stage.
            here: the driver's node; it comes first.

        Returns:
            for each stage the one whose actor is to be its own.
        """
        nodes = list(dict.fromkeys([here, *(place.node for place in places)]))
        members = {name: [s for s, device in enumerate(self._devices) if device == name] for name in self._stages}
        first = {name: places[stages[0]] for name, stages in members.items()}
        by_place = sorted(members, key=lambda name: (nodes.index(first[name].node), _numbers(first[name].gpus)))
        shape_of = {name: (len(stages), kind_of(name)) for name, stages in members.items()}
        order, bundles = list(range(len(places))), dict(self._bundle_of)
        for shape in set(shape_of.values()):
            alike, sorted_alike = ([name for name in names if shape_of[name] == shape] for names in (members, by_place))
            for name, other in zip(alike, sorted_alike, strict=True):
                bundles[name] = self._bundle_of[other]
                for stage, taken in zip(members[name], members[other], strict=True):
                    order[stage] = taken
        self._bundle_of = bundles
        return order

    def remove(self) -> None:
        """Gives the bundles back."""
        remove_placement_group(self._group)

    def _bundle(self, device: str) -> dict[str, float]:
        return {"CPU": float(self._stages[device])} | ({"GPU": 1.0} if kind_of(device) == "cuda" else {})


def _numbers(gpus: Sequence[str]) -> list[tuple[int, str]]:
    """A key that sorts numbers as such, and longer names behind them."""
    return [(len(gpu), gpu) for gpu in gpus]


def _counted(bundles: Sequence[dict[str, float]]) -> str:
    """Such as `8 x (CPU 1, GPU 1)`."""
    return ", ".join(f"{n} x ({_amounts(dict(bundle))})" for bundle, n in Counter(tuple(b.items()) for b in bundles).items())


def _cluster() -> str:
    """The nodes that live, with what each owns, and what is free of it all."""
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    owned = "; ".join(f"{node['NodeManagerAddress']}: {_amounts(node['Resources'])}" for node in nodes)
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'} ({owned}), free are {_amounts(ray.available_resources())}"  # type: ignore[no-untyped-call]


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{kind} {resources.get(kind, 0):g}" for kind in ("CPU", "GPU") if kind in resources) or "nothing"
