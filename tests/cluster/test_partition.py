"""Nodes with addresses of their own, and one that is cut off: no lane is closed, no process ends, nothing is heard any more."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import NET, Host, hosts, remove
from ray_nodes import Nodes, ray_nodes
from streams import nodes_of, streamed, texts_alone

import memra_pp

pytestmark = pytest.mark.cluster
COUNT = 3


@pytest.fixture
def machines() -> Iterator[list[Host]]:
    try:
        yield hosts(COUNT)
    finally:
        remove(COUNT)


@pytest.fixture
def nodes(machines: list[Host]) -> Iterator[Nodes]:
    """A head beside this process, without a CPU, and three machines with one each."""
    with ray_nodes() as cluster:
        cluster.add(0, f"{NET}.1", more=("--include-dashboard=false",))
        for machine in machines:
            cluster.add(1, machine.ip, machine.within)
        yield cluster


def test_a_machine_that_is_cut_off_is_given_up_and_its_stage_goes_to_another(
    nodes: Nodes, machines: list[Host], hybrid: Path
) -> None:
    texts = texts_alone(hybrid)
    with memra_pp.launch(hybrid, stages=2, silence_timeout=2.0) as pipe:
        first, second = nodes_of(pipe)
        addresses = addresses_of_nodes()
        assert first != second and {addresses[first], addresses[second]} <= {machine.ip for machine in machines}
        victim = next(machine for machine in machines if machine.ip == addresses[second])
        assert streamed(pipe, 5, victim.cut_off) == texts
        health = pipe.health()
        assert health["ready"] and "silent" in health["last_recovery"]["lost"]
        assert nodes_of(pipe)[0] == first and second not in nodes_of(pipe)
    next(node for node in nodes.nodes if node.ip == victim.ip).kill()  # it hears nobody who asks it to end


def addresses_of_nodes() -> dict[str, str]:
    import ray

    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
