"""Shared by all tests: where the data is, and the real weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memra_pp.cli import demo_weights

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture(scope="session")
def tiny(data: Path) -> Path:
    """Six random Gemma-3 layers, window 32, context 16,384, with the transformers library's logits beside them."""
    return data / "gemma3_tiny"


@pytest.fixture(scope="session")
def hybrid(data: Path) -> Path:
    """Eight random Qwen3.5 layers, two of them attention, context 16,384, with the transformers library's logits."""
    return data / "hybrid"


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Gemma-3-270M's GGUF file."""
    return demo_weights()


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `MEMRA_*` switch of the caller's shell reaches a test."""
    for name in list(os.environ):
        if name.startswith("MEMRA_"):
            monkeypatch.delenv(name)
