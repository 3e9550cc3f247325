"""Several nodes: stages along them, lanes over TCP, and a node that is lost while sessions stream."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from raylets import Nodes, ray_nodes

import memra_pp
from memra_pp.errors import ConfigError

PROMPTS = [[5, 6, 7, seed] for seed in range(4)]
NEW = 40


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A head without a CPU, and two nodes of two each."""
    with pytest.MonkeyPatch.context() as patch, ray_nodes(patch) as cluster:
        for cpus in (0, 2, 2):
            cluster.add(cpus, more=() if cluster.nodes else ("--include-dashboard=false",))
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster


@pytest.fixture(scope="module")
def texts(hybrid: Path) -> list[list[int]]:
    with memra_pp.launch(hybrid, backend="local") as alone:
        return [list(alone.generate(prompt, max_new_tokens=NEW)) for prompt in PROMPTS]


def places(pipe: memra_pp.Pipeline) -> list[str]:
    return [stage["node"] for stage in pipe.stats()["stages"]]


def streams(pipe: memra_pp.Pipeline, at: int, strike: Any) -> list[list[int]]:
    """What the prompts give, streamed at once, with something done while the first of them is given out."""

    def stream(index: int) -> list[int]:
        out = []
        for token in pipe.generate(PROMPTS[index], max_new_tokens=NEW, draft=memra_pp.Draft(k=4)):
            out.append(token)
            if index == 0 and len(out) == at:
                strike()
        return out

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(stream, range(len(PROMPTS))))


@pytest.mark.cluster
def test_stages_that_follow_each_other_share_a_node_and_the_text_is_the_same(
    nodes: Nodes, hybrid: Path, texts: list[list[int]]
) -> None:
    with memra_pp.launch(hybrid, stages=4) as pipe:
        first, second, third, fourth = places(pipe)
        assert first == second != third == fourth
        assert streams(pipe, 1, lambda: None) == texts


@pytest.mark.cluster
def test_a_stopped_stage_of_another_node_is_replaced(nodes: Nodes, hybrid: Path, texts: list[list[int]]) -> None:
    with memra_pp.launch(hybrid, stages=4, silence_timeout=2.0) as pipe:
        pid = pipe.stats()["stages"][2]["pid"]
        assert streams(pipe, 5, lambda: os.kill(pid, signal.SIGSTOP)) == texts
        assert pipe.health()["recoveries"] == 1 and not Path(f"/proc/{pid}").exists()


@pytest.mark.cluster
def test_no_room_is_said_within_the_deadline(nodes: Nodes, hybrid: Path) -> None:
    with pytest.raises(ConfigError, match=r"5 stages need 5 x \(CPU 1\).* within 1 s\. It has 3 nodes"):
        memra_pp.launch(hybrid, stages=5, placement_timeout=1.0)
    with memra_pp.launch(hybrid, stages=4) as pipe:  # nothing of that was kept
        assert len(places(pipe)) == 4


@pytest.mark.cluster
def test_a_node_is_lost_and_its_stages_go_to_another(nodes: Nodes, hybrid: Path, texts: list[list[int]]) -> None:
    with memra_pp.launch(hybrid, stages=2, silence_timeout=2.0) as pipe:
        first, second = places(pipe)
        assert first == second
        victim = next(n for n in nodes.nodes if pipe.stats()["stages"][0]["pid"] in descendants_of(n))
        assert streams(pipe, 5, victim.kill) == texts
        assert pipe.health()["ready"] and first not in places(pipe)


def descendants_of(node: Any) -> list[int]:
    from raylets import descendants

    return descendants(node.process.pid)
