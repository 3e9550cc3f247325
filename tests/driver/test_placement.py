"""Where the stages go: along nodes and GPUs, whatever order Ray gave them, and together where they share a device."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memra_pp
from memra_pp.driver.launch import ray_placement as placement
from memra_pp.driver.launch.ray_placement import Placement
from memra_pp.errors import ConfigError, StageError
from memra_pp.stage.actor import Place


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bundles that were asked for; no Ray is needed."""
    asked: list[Any] = []
    monkeypatch.setattr(placement, "placement_group", lambda bundles, strategy: asked.append((bundles, strategy)))
    monkeypatch.setattr(placement, "PlacementGroupSchedulingStrategy", lambda group, bundle: bundle)
    return asked


def place(node: str, *gpus: int) -> Place:
    return Place(node, "192.0.2.1", 8, 1, tuple(map(str, gpus)))


def test_a_device_is_a_bundle_and_those_that_share_it_share_that(groups: list[Any]) -> None:
    placed = Placement(["cuda:0", "cuda:0", "cuda:1", "cpu:0"])
    assert groups == [([{"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1}], "PACK")]
    asked = [placed.options(stage) for stage in range(4)]
    assert [o["num_gpus"] for o in asked] == [0.5, 0.5, 1, 0] and [o["scheduling_strategy"] for o in asked] == [0, 0, 1, 2]


def test_stages_follow_nodes_and_gpus_the_driver_s_first(groups: list[Any]) -> None:
    placed = Placement([f"cuda:{s}" for s in range(12)])
    places = [place("far", gpu) for gpu in (10, 2, 0, 9)] + [place("near", gpu) for gpu in (3, 1)]
    places += (
        [place("far", gpu) for gpu in (1, 3)] + [place("near", gpu) for gpu in (0, 2)] + [place("third", gpu) for gpu in (1, 0)]
    )
    order = placed.arrange(places, "near")
    assert [(places[s].node, places[s].gpus) for s in order] == [
        *(("near", (str(gpu),)) for gpu in range(4)),
        *(("far", (str(gpu),)) for gpu in (0, 1, 2, 3, 9, 10)),
        *(("third", (str(gpu),)) for gpu in range(2)),
    ]
    assert [placed.options(stage)["scheduling_strategy"] for stage in range(12)] == order


@given(
    devices=st.lists(st.integers(0, 5), min_size=1, max_size=12), nodes=st.lists(st.sampled_from("abc"), min_size=6, max_size=6)
)
def test_whatever_is_shared_stays_together(devices: list[int], nodes: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "placement_group", lambda bundles, strategy: None)
        placed = Placement([f"cpu:{d}" for d in devices])
    places = [place(nodes[d]) for d in devices]
    order = placed.arrange(places, "b")
    assert sorted(order) == list(range(len(devices)))
    for stage, taken in enumerate(order):
        others = {order[s] for s in range(len(devices)) if devices[s] == devices[stage]}
        assert others == {s for s in range(len(devices)) if devices[s] == devices[taken]}
    if len(set(devices)) == len(devices):  # all alike: as few changes of node as there can be, the driver's first
        passed = [node for node, _ in groupby(places[s].node for s in order)]
        assert len(passed) == len(set(passed)) and passed.index("b") == 0 if "b" in passed else True


def test_no_room_is_told_with_what_there_is(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": f"192.0.2.{n}", "Resources": {"CPU": 4.0, "GPU": n}} for n in (1, 2)]
    cluster = SimpleNamespace(nodes=lambda: [*nodes, {"Alive": False}], available_resources=lambda: {"CPU": 3.0})
    monkeypatch.setattr(placement, "ray", cluster)
    monkeypatch.setattr(placement, "placement_group_table", lambda group: {"state": "PENDING"})
    with pytest.raises(ConfigError) as no:
        Placement([f"cuda:{s}" for s in range(8)]).wait(0.0, lambda: None)
    assert str(no.value) == (
        "8 stages need 8 x (CPU 1, GPU 1), and Ray found no place for them within 0 s. It has 2 nodes (192.0.2.1: CPU 4, "
        "GPU 1; 192.0.2.2: CPU 4, GPU 2), free are CPU 3. Use fewer stages or other devices, add nodes, or wait longer with "
        "placement_timeout"
    )

    def closed() -> None:
        raise StageError("closed")

    with pytest.raises(StageError, match="closed"):
        Placement(["cpu:0"]).wait(60.0, closed)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), 1e9, "5", None])
def test_a_deadline_that_is_none_is_refused(hybrid: Any, seconds: Any) -> None:
    with pytest.raises(ConfigError, match="placement_timeout"):
        memra_pp.launch(hybrid, placement_timeout=seconds)
