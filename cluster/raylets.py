"""A Ray cluster of several nodes on this machine, so that stages have TCP between them as between machines."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

from memra_pp.driver.launch.ray_runtime import deferred_signals, private_dir, ray_settings, remove_dir

STORE_BYTES = 80 << 20


@contextmanager
def raylets(stages: int, nodes: int) -> Iterator[None]:
    """While it lasts, `launch` joins a cluster with room for so many stages, spread over `nodes` nodes. The driver's own node,
    one more, takes none, so that every lane is TCP."""
    environ, home = dict(os.environ), private_dir()
    os.environ |= ray_settings(home)
    cluster = Cluster()
    try:
        with deferred_signals():
            cluster.add_node(num_cpus=0, object_store_memory=STORE_BYTES, include_dashboard=False, temp_dir=home)
            for _ in range(nodes):
                cluster.add_node(num_cpus=math.ceil(stages / nodes), object_store_memory=STORE_BYTES)
        os.environ["RAY_ADDRESS"] = cluster.address
        yield
    finally:
        with deferred_signals():
            ray.shutdown()
            cluster.shutdown()
        os.environ.clear()
        os.environ.update(environ)
        remove_dir(home)
