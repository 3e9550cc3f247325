"""Network namespaces with addresses of their own, so that a node can be cut off as by a pulled cable."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

import pytest

BRIDGE, NET = "memra-test", "10.213.77"


@dataclass(frozen=True)
class Host:
    """A namespace, its address, and what runs a command in it."""

    name: str
    ip: str

    @property
    def within(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def cut_off(self) -> None:
        """Nothing reaches it any more, nor it anything."""
        ip("link", "set", f"{self.name}-out", "down")


def ip(*command: str) -> None:
    subprocess.run(["ip", *command], check=True, capture_output=True)


def hosts(count: int) -> list[Host]:
    """So many, beside this process's own at `NET.1`. A machine that allows none has its test skipped, and says why."""
    remove(count)
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine lets uid {os.getuid()} make no network namespaces: {getattr(error, 'stderr', error)}")
    ip("addr", "add", f"{NET}.1/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    made = [Host(f"memra{n}", f"{NET}.{n + 2}") for n in range(count)]
    for host in made:
        ip("netns", "add", host.name)
        ip("link", "add", f"{host.name}-out", "type", "veth", "peer", "name", f"{host.name}-in")
        ip("link", "set", f"{host.name}-out", "master", BRIDGE, "up")
        ip("link", "set", f"{host.name}-in", "netns", host.name)
        for command in (
            ("addr", "add", f"{host.ip}/24", "dev", f"{host.name}-in"),
            ("link", "set", f"{host.name}-in", "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", host.name, *command)
    return made


def remove(count: int) -> None:
    """Removes what `hosts` has made, and what an earlier run has left."""
    for n in range(count):
        subprocess.run(["ip", "netns", "del", f"memra{n}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"memra{n}-out"], capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
