"""The Ray this process uses, started or joined with its first pipeline and ended with its last."""

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
from collections.abc import Iterator
from pathlib import Path

import ray
from ray._private import ray_constants

from ...errors import StageError
from ...stage.listener import KEY_BYTES
from .cleaner import HOME, started_in
from .janitor import janitor

STOP_S = 5.0
OBJECT_STORE_BYTES = 100 << 20
MAX_PARENT_BYTES = 24
CONNECT_S = 5.0
EXIT_POLL_S = 0.02

log = logging.getLogger(__name__)


class Runtime:
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
                except StageError:
                    raise
                except Exception as error:  # Ray raises whatever it likes
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
            try:
                socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
            except OSError as error:
                raise StageError(f"no Ray answers at RAY_ADDRESS={address} ({error}): start one there, or unset it") from error
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)

    def _start(self, stages: int) -> None:
        """One node on loopback, no dashboard, a small object store, workers at normal priority."""
        self._home = home = private_dir()
        self._environ = dict(os.environ)
        for name, value in {
            **ray_settings(home),
            ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
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
        for name in [name for name in os.environ if name.startswith(("RAY_", HOME)) and name not in self._environ]:
            del os.environ[name]
        _forget_token()
        if self._home is not None:
            wait_for_exit(started_in(self._home), STOP_S)  # Ray's agents end by themselves, some time after it
            remove_dir(self._home)
            self._home = None


def ray_settings(home: str) -> dict[str, str]:
    """The environment of a Ray that is started in a private directory: a token of its own, workers at normal priority."""
    return {
        "RAY_AUTH_TOKEN": secrets.token_hex(KEY_BYTES),
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        HOME: home,
    }


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


def wait_for_exit(pids: list[int], patience_s: float) -> None:
    """Waits until processes of this node are gone, and kills those that are not after a while."""
    deadline = time.monotonic() + patience_s
    while pids := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() >= deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(EXIT_POLL_S)


def private_dir() -> str:
    """A new directory of mode 0700 whose path leaves room for a socket's name (107 bytes in all). It is removed
    when this process is killed, too."""
    parent = tempfile.gettempdir()
    path = tempfile.mkdtemp(prefix="memra-", dir=parent if len(parent) <= MAX_PARENT_BYTES else "/tmp")
    janitor.watch(path)
    return path


def remove_dir(path: str) -> None:
    """Removes a directory that ending processes may still write to."""
    deadline = time.monotonic() + STOP_S
    while Path(path).exists():
        shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            log.warning("could not remove %s", path)
            return
    janitor.forget(path)


runtime = Runtime()
"""This process's."""
