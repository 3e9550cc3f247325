"""Several nodes: stages along them, lanes over TCP, and a node that is lost while sessions stream."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import Nodes, descendants, ray_nodes
from streams import nodes_of, streamed, texts_alone

import memra_pp
from memra_pp.errors import ConfigError

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head without a CPU, and two nodes of two each."""
    with ray_nodes() as cluster:
        cluster.add(0, more=("--include-dashboard=false",))
        for _ in range(2):
            cluster.add(2)
        yield cluster


@pytest.fixture(scope="module")
def texts(hybrid: Path) -> list[list[int]]:
    return texts_alone(hybrid)


def test_stages_that_follow_each_other_share_a_node_and_the_text_is_the_same(
    nodes: Nodes, hybrid: Path, texts: list[list[int]]
) -> None:
    with memra_pp.launch(hybrid, stages=4) as pipe:
        first, second, third, fourth = nodes_of(pipe)
        assert first == second != third == fourth
        assert streamed(pipe, 1, lambda: None) == texts


def test_bytes_are_cut_by_what_the_nodes_have(nodes: Nodes, hybrid: Path) -> None:
    with memra_pp.launch(hybrid, stages=3, balance="bytes") as pipe:  # of the third stage, alone on its node, is twice as much
        sizes = [stage["arena_bytes"] for stage in pipe.stats()["stages"]]
        assert sizes[2] > 1.5 * max(sizes[:2])


def test_a_stopped_stage_of_another_node_is_replaced(nodes: Nodes, hybrid: Path, texts: list[list[int]]) -> None:
    with memra_pp.launch(hybrid, stages=4, silence_timeout=2.0) as pipe:
        pid = pipe.stats()["stages"][2]["pid"]
        assert streamed(pipe, 5, lambda: os.kill(pid, signal.SIGSTOP)) == texts
        assert pipe.health()["recoveries"] == 1 and not Path(f"/proc/{pid}").exists()


def test_no_room_is_said_within_the_deadline_and_nothing_is_kept(nodes: Nodes, hybrid: Path) -> None:
    with pytest.raises(ConfigError, match=r"5 stages need 5 x \(CPU 1\).* within 1 s\. It has 3 nodes"):
        memra_pp.launch(hybrid, stages=5, placement_timeout=1.0)
    with memra_pp.launch(hybrid, stages=4) as pipe:
        assert len(nodes_of(pipe)) == 4


def test_a_node_is_lost_and_its_stages_go_to_another(nodes: Nodes, hybrid: Path, texts: list[list[int]]) -> None:
    with memra_pp.launch(hybrid, stages=2, silence_timeout=2.0) as pipe:
        first, second = nodes_of(pipe)
        assert first == second
        pid = pipe.stats()["stages"][0]["pid"]
        victim = next(node for node in nodes.nodes if pid in descendants(node.process.pid))
        assert streamed(pipe, 5, victim.kill) == texts
        assert pipe.health()["ready"] and first not in nodes_of(pipe)
