"""Ray clusters for tests: several nodes on this machine, each a process of its own that can be killed or cut off."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memra_pp.driver.launch.ray_runtime import ray_settings

START_S, END_S = 60.0, 20.0
OBJECT_STORE_BYTES = 80 << 20
QUICK = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}
"""A lost node is noticed within seconds."""


@dataclass
class Node:
    """One `ray start --block`, its address, and what runs commands where it is."""

    process: subprocess.Popen[bytes]
    ip: str
    within: tuple[str, ...]

    def kill(self) -> None:
        """Ends the node as a power cut does: everything in its process group and below it, at once."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(END_S)

    def end(self) -> None:
        """Ends the node in an orderly way."""
        below = descendants(self.process.pid)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        deadline = time.monotonic() + END_S
        while (left := [pid for pid in below if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.kill()


@dataclass
class Nodes:
    """A head, at `address`, and the nodes that joined it."""

    home: str
    env: dict[str, str]
    nodes: list[Node] = field(default_factory=list)
    address: str = ""

    def add(self, cpus: int, ip: str = "127.0.0.1", within: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> Node:
        """Starts a node, the first one as the head, and waits until it serves."""
        common = ["--block", f"--num-cpus={cpus}", f"--node-ip-address={ip}", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        if self.nodes:
            common += [f"--address={self.address}"]
        else:
            port = free_port()
            self.address = os.environ["RAY_ADDRESS"] = f"{ip}:{port}"
            common += ["--head", f"--port={port}", f"--temp-dir={self.home}"]
        log = Path(self.home, f"node-{len(self.nodes)}.log")
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*within, str(Path(sys.executable).parent / "ray"), "start", *common, *more],
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        node = Node(process, ip, within)
        self.nodes.append(node)
        deadline = time.monotonic() + START_S
        while b"Ray runtime started" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"a node did not start: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        return node

    def end(self) -> None:
        for node in reversed(self.nodes):
            node.end()


def descendants(pid: int) -> list[int]:
    """Every process below one, by the parents that they have now."""
    children: dict[int, list[int]] = {}
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((proc / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(proc.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def read_settings() -> None:
    """Has Ray read the environment again, which it did when it was imported."""
    from ray._raylet import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """No node yet; once there is a head, `launch` joins it."""
    import ray

    assert not ray.is_initialized()
    home, before = tempfile.mkdtemp(prefix="ray-", dir="/tmp"), dict(os.environ)
    settings = {
        **ray_settings(home),
        "RAY_AUTH_MODE": "token",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        **QUICK,
    }
    os.environ |= settings
    read_settings()
    nodes = Nodes(home, {**before, **settings, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"})
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.end()
        os.environ.clear()
        os.environ.update(before)
        read_settings()
        shutil.rmtree(home, ignore_errors=True)
