"""The CPU backend: the cache's device over NumPy and every array kernel."""

from .append import append
from .cpu import CpuDev

__all__ = ["CpuDev", "append"]
