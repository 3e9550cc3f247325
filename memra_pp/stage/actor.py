"""The Ray actor around a `StageWorker`. Ray places and starts it; frames and control come over lanes."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

import ray

from ..admission import Device
from ..errors import StageError
from ..kernels.devices import free_bytes
from ..models.protocol import StageModel
from .boundary import Offer
from .lanes import Lane
from .listener import Listener, connect
from .outbox import SEND_S
from .serve import serve_control, serve_frames
from .spec import StageSpec
from .worker import StageWorker

WIRE_S = 30.0


@dataclass(frozen=True)
class Place:
    """Where Ray has put an actor: the node's id, its address and its cores, the actor's process, and the GPUs it was given."""

    node: str
    ip: str
    cores: int
    pid: int
    gpus: tuple[str, ...]


@ray.remote(max_restarts=0, max_task_retries=0)
class StageActor:
    """One stage. `where`, `free_bytes`, `load`, `share`, `reserve` once; then `listen`, `wire` and one long `serve` for each
    epoch: it ends when a lane breaks, and the weights stay."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._worker: StageWorker | None = None
        self._listener: Listener | None = None
        self._down: Lane | None = None

    def where(self) -> Place:
        """Where this actor is."""
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return Place(ray.get_runtime_context().get_node_id(), node_ip(), os.cpu_count() or 1, os.getpid(), gpus)

    def free_bytes(self, device: str) -> int:
        """What its machine, or its GPU, has free."""
        return free_bytes(device, gpu=0)

    def load(self, spec: StageSpec, model: type[StageModel]) -> None:
        """Loads the stage's weights."""
        self._worker = StageWorker.load(spec, model, gpu=0)  # Ray shows an actor the GPUs that are its own

    def share(self) -> Device:
        """This stage's part of its device."""
        return self._loaded().share()

    def reserve(self, budget: int) -> None:
        """Reserves the arena of this stage's device, in bytes."""
        self._loaded().reserve(budget)

    def listen(self, address: str) -> tuple[str, Offer | None]:
        """Listens at `address`; the address to connect to, and the slots to write rows to."""
        self._unplug()
        worker, self._listener = self._loaded(), Listener(address, self._key)
        return self._listener.address, worker.boundary.offer()

    def wire(self, downstream: str, peer: str, offer: Offer | None) -> None:
        """Opens the lane to the next stage, or to the driver after the last."""
        self._down = down = connect(downstream, "frames", self._key, WIRE_S, peer)
        self._loaded().boundary.lead_out(offer, lambda: down.await_slot(SEND_S))

    def serve(self, epoch: int) -> None:
        """Passes frames, without a session at first, until the driver says stop or a lane breaks."""
        worker, listener, down = self._loaded(), self._listener, self._down
        if listener is None or down is None:
            raise StageError(f"{worker.spec} has no lanes: have it listen and wire it before it serves")
        stop, up = threading.Event(), None
        try:
            worker.begin(epoch)
            up, control = listener.accept("frames", WIRE_S), listener.accept("control", WIRE_S)
            worker.boundary.come_back(up.give_back)
            thread = threading.Thread(target=serve_control, args=(worker, control, stop), name="control", daemon=True)
            thread.start()
            serve_frames(worker, up, down, stop)
        finally:
            self._unplug()
            if up is not None:
                up.close()

    def _unplug(self) -> None:
        """Lets go of what was wired."""
        listener, self._listener, down, self._down = self._listener, None, self._down, None
        if listener is not None:
            listener.close()
        if down is not None:
            down.close()

    def _loaded(self) -> StageWorker:
        if self._worker is None:
            raise StageError("this stage has not loaded its weights yet")
        return self._worker


@ray.remote(num_cpus=0, max_retries=0)
def kill_process(pid: int) -> None:
    """Ends a process of the node it runs on, which need not answer: a stopped actor heeds nothing that Ray sends."""
    os.kill(pid, signal.SIGKILL)


def node_ip() -> str:
    """The address under which this node's peers reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
