"""Fuzzes one target with atheris, guided by coverage: python -m fuzz.run TARGET [seconds]

Ends with an error at the first input that raises anything but a `MemraError`, takes longer than ten seconds, or more memory
than a gigabyte; the input is in the folder where it runs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["memra_pp"]):
    from fuzz.targets import MAX_INPUT, SEEDS, TARGETS

HANGS_S, MEMORY_MB = 10, 1024


def main() -> None:
    name, seconds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60
    with tempfile.TemporaryDirectory(prefix="memra-corpus-") as corpus:
        for i, seed in enumerate(SEEDS[name]()):
            (Path(corpus) / str(i)).write_bytes(seed)
        options = {
            "max_total_time": seconds,
            "timeout": HANGS_S,
            "rss_limit_mb": MEMORY_MB,
            "max_len": MAX_INPUT,
            "print_final_stats": 1,
        }
        atheris.Setup([sys.argv[0], corpus, *(f"-{option}={value}" for option, value in options.items())], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
