"""The Ray backend: starts or joins a cluster, places one actor a stage, and wires the lanes between them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ..admission import pooled
from ..errors import ConfigError, LaneError, MemraError, StageError
from ..kernels.devices import kind_of, require_gpus
from ..models.protocol import StageModel
from ..stage.actor import StageActor, node_ip
from ..stage.boundary import Offer
from ..stage.lanes import Lane
from ..stage.listener import KEY_BYTES, Listener, connect
from ..stage.spec import StageSpec
from .chain import Progress
from .lane_chain import LaneChain

START_S = 120.0
LOAD_S = 900.0
WIRE_S = 60.0
STOP_S = 5.0
OBJECT_STORE_BYTES = 100 << 20
MAX_PARENT_BYTES = 24
EXIT_POLL_S = 0.02
CONNECT_S = 5.0

log = logging.getLogger(__name__)


class _Runtime:
    """The Ray this process uses. One that was running is joined and left alone; else one is started, in a private directory,
    and stopped with the last pipeline that uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._home: str | None = None
        self._environ: dict[str, str] = {}
        self._clusters = True

    def acquire(self, stages: int) -> None:
        """Raises StageError if Ray can be neither joined nor started."""
        with self._lock:
            if not ray.is_initialized():
                try:
                    if address := os.environ.get("RAY_ADDRESS"):
                        self._join(address)
                    else:
                        self._start(stages)
                except (RuntimeError, ValueError, OSError, RayError) as error:
                    raise StageError(f"Ray did not start: {error}") from error
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._home is not None and self._users == 0:
                self._stop()

    def _join(self, address: str) -> None:
        """Joins a running cluster. Ray would try an address where nobody listens for minutes."""
        host, _, port = address.rpartition(":")
        if port.isdigit():
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

    def _start(self, stages: int) -> None:
        """One node on loopback, no dashboard, a small object store, workers at normal priority."""
        self._home = home = private_dir()
        self._environ = dict(os.environ)
        for name, value in {
            "RAY_AUTH_TOKEN": secrets.token_hex(KEY_BYTES),
            ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }.items():
            os.environ.setdefault(name, value)
        _forget_token()
        # The one switch that makes Ray listen on loopback alone. Ray reads the variable when it is imported, which may
        # have been before this.
        self._clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
        try:
            ray.init(
                num_cpus=max(stages, os.cpu_count() or 1),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=home,
            )
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        ray.shutdown()
        ray_constants.ENABLE_RAY_CLUSTER = self._clusters
        for name in [name for name in os.environ if name.startswith("RAY_") and name not in self._environ]:
            del os.environ[name]
        _forget_token()
        if self._home is not None:
            remove_dir(self._home)
            self._home = None


def _forget_token() -> None:
    """Makes Ray look for its token again: it keeps the first that this process has used, be it a cluster's that is gone."""
    loader = getattr(ray._raylet, "AuthenticationTokenLoader", None)
    if loader is not None:
        loader.instance().reset_cache()


@contextlib.contextmanager
def deferred_signals() -> Iterator[None]:
    """Holds back SIGINT and SIGTERM, which in the middle of Ray's start or end would leave its processes behind, and restores
    the handlers, which Ray replaces. Only a main thread has any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {s: signal.signal(s, lambda number, frame: came.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def private_dir() -> str:
    """A new directory of mode 0700 whose path leaves room for a socket's name (107 bytes in all)."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="memra-", dir=parent if len(parent) <= MAX_PARENT_BYTES else "/tmp")


def remove_dir(path: str) -> None:
    """Removes a directory that ending processes may still write to."""
    deadline = time.monotonic() + STOP_S
    while Path(path).exists():
        shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            log.warning("could not remove %s", path)
            return


_runtime = _Runtime()


def launch_ray(specs: Sequence[StageSpec], model: type[StageModel], progress: Progress) -> LaneChain:
    """Starts one actor a stage, loads them in parallel and wires them into a chain.

    Raises:
        ConfigError: the weights cannot be used, or the cluster has not enough CPUs or GPUs.
        StageError: a stage did not start in time; nothing is left running.
    """
    if not (ray.is_initialized() or os.environ.get("RAY_ADDRESS")):
        require_gpus([spec.device for spec in specs])  # of this machine: the one node of the Ray that is started then
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
        self._dir = private_dir()
        self._actors: list[Any] = []
        self._where: list[dict[str, Any]] = []
        self._serving: list[Any] = []
        self._lanes: list[Lane] = []
        self._listener: Listener | None = None
        self._acquired = False

    def run(self) -> LaneChain:
        steps = len(self._specs) + 2
        self._progress("starting Ray", 0, steps)
        with deferred_signals():
            _runtime.acquire(len(self._specs))
            self._acquired = True
        self._place()
        self._progress("loading stages", 1, steps)
        addresses, offers = zip(*self._load(steps), strict=True)
        self._progress("wiring the stages", steps - 1, steps)
        self._listener = Listener(self._address("driver"), self._key)
        downstream = [*addresses[1:], self._listener.address]
        peers = [*map(str, self._specs[1:]), "the driver"]
        ends = zip(self._actors, downstream, peers, [*offers[1:], None], strict=True)
        shares = self._each([actor.wire.remote(*end) for actor, *end in ends], WIRE_S)
        devices, homes = pooled(shares)
        self._require_together(homes)
        self._each([a.reserve.remote(devices[home].budget) for a, home in zip(self._actors, homes, strict=True)], WIRE_S)
        self._serving = [actor.serve.remote() for actor in self._actors]
        names = [str(spec) for spec in self._specs]
        out = self._lane(addresses[0], "frames", names[0])
        control = [self._lane(a, "control", name) for a, name in zip(addresses, names, strict=True)]
        back = self._listener.accept("frames", WIRE_S)
        self._lanes.append(back)
        return LaneChain(self._specs, devices, homes, out, back, control, self.autopsy, self.close)

    def autopsy(self) -> str | None:
        """Which stage's serving ended, and why: the first that did not merely lose its neighbour."""
        if not ray.is_initialized():
            return None
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
        """Ends the actors and everything started for them, also when Ray was shut down under them."""
        for lane in self._lanes:
            lane.close()
        if self._listener is not None:
            self._listener.close()
        try:
            if self._acquired and ray.is_initialized():
                self._end_actors()
        finally:
            with deferred_signals():
                if self._acquired:
                    self._acquired = False
                    _runtime.release()
                remove_dir(self._dir)

    def _end_actors(self) -> None:
        """Ends the actors and waits until this node's are gone; one that will not go (a stopped one, say) is killed."""
        with contextlib.suppress(RayError, ValueError):  # a ValueError: these references are of a Ray that was shut down
            if self._serving:
                ray.wait(self._serving, num_returns=len(self._serving), timeout=STOP_S)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        here = ray.get_runtime_context().get_node_id()
        pids = [w["pid"] for w in self._where if w["node"] == here]
        deadline = time.monotonic() + STOP_S
        while pids := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            if time.monotonic() > deadline:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                return
            time.sleep(EXIT_POLL_S)

    def _place(self) -> None:
        gpus = [1 / spec.share if kind_of(spec.device) == "cuda" else 0.0 for spec in self._specs]
        self._await("CPU", len(self._specs))
        self._await("GPU", sum(gpus))
        actor_class: Any = StageActor
        placed = [actor_class.options(num_cpus=1, num_gpus=gpu).remote(self._key) for gpu in gpus]
        self._actors = placed
        where = self._each([actor.where.remote() for actor in placed], START_S)
        nodes = list(dict.fromkeys(w["node"] for w in where))
        order = sorted(range(len(placed)), key=lambda i: nodes.index(where[i]["node"]))
        self._actors = [placed[i] for i in order]
        self._where = [where[i] for i in order]

    def _await(self, kind: str, need: float) -> None:
        """Waits a little for what a pipeline before this one has just given back; actors that cannot be placed would else stay
        pending without an error."""
        deadline = time.monotonic() + STOP_S
        while (have := ray.available_resources().get(kind, 0)) < need:  # type: ignore[no-untyped-call]
            owned = ray.cluster_resources().get(kind, 0)  # type: ignore[no-untyped-call]
            if owned < need or time.monotonic() > deadline:
                raise ConfigError(
                    f"{len(self._specs)} stages need {need:g} {kind} and this Ray cluster has {have:g} of {owned:g} free: "
                    "use fewer stages, or other devices"
                )
            time.sleep(EXIT_POLL_S)

    def _load(self, steps: int) -> list[tuple[str, Offer | None]]:
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

    def _require_together(self, homes: Sequence[int]) -> None:
        """Stages that share a device's memory are on one node."""
        for stage, home in enumerate(homes):
            first = homes.index(home)
            if self._where[stage]["node"] != self._where[first]["node"]:
                raise ConfigError(
                    f"stages {first} and {stage} are to share device {self._specs[stage].device}, and Ray has placed them on "
                    "two nodes: name a device for each, or use one node"
                )

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
