"""Block formats as the numbers kernels take: a format's code is its place in `BLOCK_BYTES`."""

from __future__ import annotations

from collections.abc import Mapping

from ..cache.formats import BLOCK_BYTES, LARGEST

FORMAT_CODES: Mapping[str, int] = {fmt: code for code, fmt in enumerate(BLOCK_BYTES)}
CODE_BYTES = tuple(BLOCK_BYTES.values())
"""Bytes of a block of 32 elements."""
CODE_LARGEST = tuple(LARGEST[fmt] for fmt in BLOCK_BYTES)
"""The largest magnitude that is kept."""
