"""The Ray backend: starts or joins a cluster, places one actor a stage, and wires the lanes between them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ..errors import ConfigError, LaneError, MemraError, StageError
from ..models.protocol import StageModel
from ..stage.actor import StageActor, node_ip
from ..stage.lanes import KEY_BYTES, Lane, Listener, connect
from ..stage.spec import StageSpec
from .chain import Progress
from .lane_chain import LaneChain

START_S = 120.0
LOAD_S = 900.0
WIRE_S = 60.0
STOP_S = 5.0
OBJECT_STORE_BYTES = 100 << 20


class _Runtime:
    """The Ray this process uses: one that was running is joined and left alone, else one is started and stopped with the
    last pipeline that uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._own = False
        self._token: str | None = None

    def acquire(self, stages: int) -> None:
        with self._lock:
            if not ray.is_initialized():
                self._own = not _joined()
                if self._own:
                    self._start(stages)
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._own and self._users == 0:
                ray.shutdown()
                self._own = False
                if self._token is not None:
                    os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
                    shutil.rmtree(Path(self._token).parent, ignore_errors=True)
                    self._token = None

    def _start(self, stages: int) -> None:
        """One node on loopback, no dashboard, a small object store, workers at normal priority."""
        if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            self._token = str(Path(tempfile.mkdtemp(prefix="memra-ray-")) / "token")
            Path(self._token).write_text(secrets.token_hex(KEY_BYTES))
            os.environ["RAY_AUTH_TOKEN_PATH"] = self._token
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            num_cpus=max(stages, os.cpu_count() or 1),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


_runtime = _Runtime()


def _joined() -> bool:
    if "RAY_ADDRESS" not in os.environ:
        return False
    ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    return True


def launch_ray(specs: Sequence[StageSpec], model: type[StageModel], progress: Progress) -> LaneChain:
    """Starts one actor a stage, loads them in parallel and wires them into a chain.

    Raises:
        ConfigError: the weights cannot be used, or the cluster has not enough CPUs.
        StageError: a stage did not start in time; nothing is left running.
    """
    launching = _Launch(specs, model, progress)
    try:
        return launching.run()
    except BaseException:
        launching.close()
        raise


class _Launch:
    """A launch on its way, and later what has to be undone when the pipeline closes."""

    def __init__(self, specs: Sequence[StageSpec], model: type[StageModel], progress: Progress) -> None:
        self._specs = list(specs)
        self._model = model
        self._progress = progress
        self._key = secrets.token_bytes(KEY_BYTES)
        self._dir = tempfile.mkdtemp(prefix="memra-")
        self._actors: list[Any] = []
        self._serving: list[Any] = []
        self._lanes: list[Lane] = []
        self._listener: Listener | None = None
        self._acquired = False

    def run(self) -> LaneChain:
        steps = len(self._specs) + 2
        self._progress("starting Ray", 0, steps)
        _runtime.acquire(len(self._specs))
        self._acquired = True
        self._place()
        self._progress("loading stages", 1, steps)
        addresses = self._load(steps)
        self._progress("wiring the stages", steps - 1, steps)
        self._listener = Listener(self._address("driver"), self._key)
        downstream = [*addresses[1:], self._listener.address]
        peers = [*map(str, self._specs[1:]), "the driver"]
        budgets = self._each([a.wire.remote(d, p) for a, d, p in zip(self._actors, downstream, peers, strict=True)], WIRE_S)
        self._serving = [actor.serve.remote() for actor in self._actors]
        names = [str(spec) for spec in self._specs]
        out = self._lane(addresses[0], "frames", names[0])
        control = [self._lane(a, "control", name) for a, name in zip(addresses, names, strict=True)]
        back = self._listener.accept("frames", WIRE_S)
        self._lanes.append(back)
        return LaneChain(self._specs, budgets, out, back, control, self.autopsy, self.close)

    def autopsy(self) -> str | None:
        """Which stage's serving ended, and why: the first that did not merely lose its neighbour."""
        ended, _ = ray.wait(self._serving, num_returns=len(self._serving), timeout=0)
        causes: list[str] = []
        for spec, ref in zip(self._specs, self._serving, strict=True):
            if ref not in ended:
                continue
            try:
                ray.get(ref)
            except RayTaskError as error:
                if not isinstance(error.cause, LaneError):
                    causes.append(f"{spec} failed: {error.cause!r}")
            except RayError as error:
                causes.append(f"{spec} died: {type(error).__name__}")
        return causes[0] if causes else None

    def close(self) -> None:
        """Ends the actors and everything started for them."""
        for lane in self._lanes:
            lane.close()
        if self._listener is not None:
            self._listener.close()
        if self._acquired:
            self._acquired = False
            if self._serving:
                ray.wait(self._serving, num_returns=len(self._serving), timeout=STOP_S)
            for actor in self._actors:
                with contextlib.suppress(RayError):
                    ray.kill(actor, no_restart=True)
            _runtime.release()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _place(self) -> None:
        have = ray.cluster_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
        if have < len(self._specs):
            raise ConfigError(f"{len(self._specs)} stages need a CPU each and this Ray cluster has {have:.0f}: use fewer")
        actor_class: Any = StageActor
        placed = [actor_class.options(num_cpus=1).remote(self._key) for _ in self._specs]
        self._actors = placed
        where = self._each([actor.where.remote() for actor in placed], START_S)
        nodes = list(dict.fromkeys(w["node"] for w in where))
        order = sorted(range(len(placed)), key=lambda i: nodes.index(where[i]["node"]))
        self._actors = [placed[i] for i in order]
        self._where = [where[i] for i in order]

    def _load(self, steps: int) -> list[str]:
        refs = [
            actor.load.remote(spec, self._model, self._address(f"stage{spec.stage}", w))
            for actor, spec, w in zip(self._actors, self._specs, self._where, strict=True)
        ]
        deadline = time.monotonic() + LOAD_S
        waiting = list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise StageError(f"{len(waiting)} stages did not load within {LOAD_S:.0f} s: look for a slow disk")
            self._each(done, START_S)
            loaded = len(refs) - len(waiting)
            self._progress(f"loaded {loaded} of {len(refs)} stages", 1 + loaded, steps)
        return self._each(refs, START_S)

    def _address(self, name: str, where: dict[str, Any] | None = None) -> str:
        """A Unix socket while everything is on this node, TCP else."""
        here = ray.get_runtime_context().get_node_id()
        if all(w["node"] == here for w in self._where):
            return f"unix:{self._dir}/{name}"
        return f"tcp:{where['ip'] if where else node_ip()}:0"

    def _lane(self, address: str, role: str, peer: str) -> Lane:
        lane = connect(address, role, self._key, WIRE_S, peer)
        self._lanes.append(lane)
        return lane

    def _each(self, refs: list[Any], timeout: float) -> list[Any]:
        """The results of Ray calls, with a stage's own error as it was raised there."""
        try:
            return list(ray.get(refs, timeout=timeout))
        except RayTaskError as error:
            if isinstance(error.cause, MemraError):
                raise error.cause from None
            raise StageError(f"a stage failed while it started: {error.cause!r}") from error
        except GetTimeoutError as error:
            raise StageError(f"a stage did not start within {timeout:.0f} s: is the cluster full?") from error
        except RayError as error:
            raise StageError(f"a stage died while it started: {type(error).__name__}: {error}") from error
