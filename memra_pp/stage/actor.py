"""The Ray actor around a `StageWorker`. Ray places and starts it; frames and control come over lanes."""

from __future__ import annotations

import os
import threading
from typing import Any

import ray

from ..admission import Device
from ..errors import StageError
from ..models.protocol import StageModel
from .boundary import Offer
from .lanes import Lane
from .listener import Listener, connect
from .outbox import SEND_S
from .serve import serve_control, serve_frames
from .spec import StageSpec
from .worker import StageWorker

WIRE_S = 30.0


@ray.remote(max_restarts=0, max_task_retries=0)
class StageActor:
    """One stage. `where`, `load`, `wire`, then one long `serve`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._stop = threading.Event()
        self._worker: StageWorker | None = None
        self._listener: Listener | None = None
        self._down: Lane | None = None

    def where(self) -> dict[str, Any]:
        """Where Ray put this actor: node id, address and process."""
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "ip": node_ip(),
            "pid": os.getpid(),
        }

    def load(self, spec: StageSpec, model: type[StageModel], address: str) -> tuple[str, Offer | None]:
        """Loads the stage's weights and listens at `address`; the address to connect to, and the slots to write rows to."""
        self._worker = StageWorker.load(spec, model, gpu=0)  # Ray shows an actor the GPUs that are its own
        self._listener = Listener(address, self._key)
        return self._listener.address, self._worker.boundary.offer()

    def wire(self, downstream: str, peer: str, offer: Offer | None) -> Device:
        """Opens the lane to the next stage, or to the driver after the last; this stage's part of its device."""
        worker, _ = self._loaded()
        self._down = down = connect(downstream, "frames", self._key, WIRE_S, peer)
        worker.boundary.lead_out(offer, lambda: down.await_slot(SEND_S))
        return worker.share()

    def reserve(self, budget: int) -> None:
        """Reserves the arena of this stage's device, in bytes."""
        self._loaded()[0].reserve(budget)

    def serve(self) -> None:
        """Passes frames until the driver says stop or a lane breaks."""
        worker, listener = self._loaded()
        if self._down is None:
            raise StageError(f"{worker.spec} has no downstream lane: wire it before it serves")
        up, control = listener.accept("frames", WIRE_S), listener.accept("control", WIRE_S)
        worker.boundary.come_back(up.give_back)
        thread = threading.Thread(target=serve_control, args=(worker, control, self._stop), name="control", daemon=True)
        thread.start()
        try:
            serve_frames(worker, up, self._down, self._stop)
        finally:
            listener.close()
            up.close()
            self._down.close()
            worker.close()

    def _loaded(self) -> tuple[StageWorker, Listener]:
        if self._worker is None or self._listener is None:
            raise StageError("this stage has not loaded its weights yet")
        return self._worker, self._listener


def node_ip() -> str:
    """The address under which this node's peers reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
