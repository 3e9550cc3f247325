"""Every command and every block of Python in the documents is run as it is written there, on small models under the names that
the documents use. What cannot be run here is listed with the reason, and checked in another way."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, SHOWN, blocks, documents
from small_models import write_small_gguf, write_small_llama

import memra_pp
from memra_pp import cli

BLOCKS = [block for document in documents() for block in blocks(document)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
COMMANDS = list(
    dict.fromkeys((block.document, command) for block in BLOCKS if block.language == "sh" for command in block.commands)
)

OVER_RAY = "--drafter ngram"
"""The first such command runs over Ray, as all would; the others in one process, by a default of the tests alone."""


# What is not run, and what is checked instead


def extra_is_there(command: str) -> None:
    """An install would fetch from an index."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.search(r"\[([\w,]+)\]", command)
    assert named is not None and extras.keys() >= set(named[1].split(","))


def target_is_there(command: str) -> None:
    """A target sets up an environment of its own, or takes minutes."""
    subprocess.run(["make", "--dry-run", shlex.split(command, comments=True)[1]], cwd=ROOT, check=True, capture_output=True)


def files_are_there(command: str) -> None:
    """It needs machines of its own, an image registry, or serves until it is ended."""
    named = [word for word in shlex.split(command, comments=True) if word.startswith(("cluster/", "examples/"))]
    assert named and all((ROOT / name).is_file() for name in named)


NOT_RUN: dict[str, Callable[[str], None]] = {
    "pip install ": extra_is_there,
    "make ": target_is_there,
    **dict.fromkeys(("ray ", "docker ", "kubectl ", "python examples/serve.py "), files_are_there),
}
"""How such a command begins, and its check."""

NO_GPU = "--device cuda"
"""A command for GPUs is refused in one line here."""


# What the documents' names stand for


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that documents name, and the command."""
    place = tmp_path_factory.mktemp("documents")
    data = ROOT / "tests" / "data"
    write_small_gguf(place / "model.gguf")
    write_small_llama(place / "llama")
    shutil.copy(data / "configs" / "qwen3_5-27b.json", place / "config.json")
    (place / "weights").mkdir()
    (place / "weights" / "model.safetensors").symlink_to(data / "hybrid" / "model.safetensors")
    config = json.loads((data / "hybrid" / "config.json").read_text())
    (place / "weights" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 65536}))
    (place / "bin").mkdir()
    command = place / "bin" / "memra-pp"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memra_pp.cli "$@" $OPTIONS\n')
    command.chmod(0o755)
    return place


def given_pipe(place: Path, stack: ExitStack) -> memra_pp.Pipeline:
    return stack.enter_context(memra_pp.launch(place / "model.gguf", stages=4))


def given_session(place: Path, stack: ExitStack) -> memra_pp.Session:
    """One that has generated some tokens."""
    session = stack.enter_context(given_pipe(place, stack).open(IDS, max_new_tokens=128, speculate=8))
    assert len(list(session.generate(4))) == 4
    return session


IDS = [2, 316, 278, 275, 260, 273, 271]

GIVEN: dict[str, Callable[[Path, ExitStack], Any]] = {
    "ids": lambda place, stack: IDS,
    "prompts": lambda place, stack: [[*IDS, 260 + n] for n in range(5)],
    "pipe": given_pipe,
    "other_pipe": given_pipe,
    "s": given_session,
}
"""What documents leave to the reader to set, given anew to each block that uses it."""


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch` runs stages in this process unless it is told otherwise."""
    monkeypatch.setitem(memra_pp.launch.__kwdefaults__, "backend", "local")


# The tests


def test_every_block_is_run_or_shown() -> None:
    unknown = [f"{block}: {block.language}" for block in BLOCKS if block.language not in ("sh", "python", *SHOWN)]
    assert not unknown and PYTHON and COMMANDS


@pytest.mark.parametrize("document", dict.fromkeys(block.document for block in PYTHON))
def test_python(document: str, place: Path, local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document's blocks in order, as a reader types them: what one defines is there for the next."""
    monkeypatch.chdir(place)
    names: dict[str, Any] = {"__name__": "__main__", "memra_pp": memra_pp, "asyncio": asyncio}
    for block in (block for block in PYTHON if block.document == document):
        tree = ast.parse("\n" * (block.line - 1) + block.text, document)
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        code = compile(tree, document, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        with ExitStack() as stack:
            names |= {name: give(place, stack) for name, give in GIVEN.items() if name in used}
            if (waiting := eval(code, names)) is not None:
                asyncio.run(waiting)


@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=str)
def test_command(document: str, command: str, place: Path) -> None:
    """In the documents' order: one may use what another has written."""
    check = next((check for start, check in NOT_RUN.items() if command.startswith(start)), None)
    if check is not None:
        check(command)
        return
    over_ray = command == next(command for _, command in COMMANDS if OVER_RAY in command)
    launches = re.match(r"memra-pp (run|bench|export|import) ", command) and "--backend" not in command
    options = "--backend local" if launches and not over_ray else ""
    done = run(command, place, options + " --seconds 2" * command.startswith("memra-pp bench"))
    if NO_GPU in command:
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and "cuda" in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_the_plan_that_is_shown(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    readme = [block for block in BLOCKS if block.document == "README.md"]
    asked, shown = next((a, b) for a, b in pairwise(readme) if a.text.startswith("memra-pp plan"))
    assert cli.main(shlex.split(asked.text, comments=True)[1:]) == 0
    assert capsys.readouterr().out.strip() == shown.text.strip()


def test_every_message_explained_is_one_of_the_code() -> None:
    said = []
    for path in (ROOT / "memra_pp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.JoinedStr(values=parts):
                    said.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts))
                case ast.Constant(value=str(text)):
                    said.append(text)
    explained = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    patterns = {message: ".*".join(re.escape(part.strip()) for part in message.split("...")) for message in explained}
    unknown = [message for message, pattern in patterns.items() if not any(re.search(pattern, text) for text in said)]
    assert explained and not unknown


def run(command: str, place: Path, options: str) -> subprocess.CompletedProcess[str]:
    """A command of a document, in a shell where `memra-pp` is this tree's, with `options` behind those given."""
    env = {
        **os.environ,
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OPTIONS": options,
    }
    return subprocess.run(["bash", "-c", command], cwd=place, env=env, capture_output=True, text=True, timeout=240, check=False)
