"""Who may import whom: layers point one way, and heavy packages stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.util import resolve_name
from pathlib import Path

import pytest

import memra_pp

ROOT = Path(memra_pp.__file__).parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

LEVEL = {
    "errors": 0,
    "config": 1,
    "cache": 2,
    "kernels": 3,
    "admission": 3,
    "models": 4,
    "stage": 5,
    "driver": 6,
    "cli": 7,
    "aio": 7,
}
"""A part imports itself and parts of a lower level; `kernels` and `admission` do not know each other."""

HOMES = {
    "ray": ["stage/actor.py", "driver/launch*", "*/metrics_ray.py"],
    "cupy": ["kernels/cuda*", "stage/cuda*"],
    "cupy_backends": ["kernels/cuda*", "stage/cuda*"],
    "numba": ["kernels/*"],
    "llvmlite": ["kernels/*"],
    "pickle": [],
    "cloudpickle": [],
    "dill": [],
    "marshal": [],
    "shelve": [],
}
"""Where a package may be imported, by path inside memra_pp; anything not listed, anywhere."""

HEAVY = ["ray", "numba", "llvmlite", "cupy"]


def imports(module: str, source: str | None = None) -> Iterator[str]:
    """The absolute names that a module imports, at whatever depth and however guarded."""
    package = ".".join(["memra_pp", *Path(module).parts[:-1]])
    for node in ast.walk(ast.parse((ROOT / module).read_text() if source is None else source)):
        match node:
            case ast.Import(names):
                yield from (name.name for name in names)
            case ast.ImportFrom(name, names, level):
                origin = resolve_name("." * level + (name or ""), package)
                yield from (f"{origin}.{alias.name}" for alias in names)
            case ast.Call(
                ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"), [ast.Constant(name), *_]
            ):
                yield resolve_name(name, package)


def part_of(name: str) -> str | None:
    """The part of memra_pp that an absolute name is in, None if it is in none."""
    root, _, rest = name.partition(".")
    return (rest.split(".")[0] or None) if root == "memra_pp" else None


def broken_layers(module: str, names: Iterator[str]) -> list[str]:
    here = Path(module).parts[0].removesuffix(".py")
    parts = {name: part_of(name) for name in names}
    return [name for name, part in parts.items() if part is not None and part != here and LEVEL[part] >= LEVEL[here]]


def far_from_home(module: str, names: Iterator[str]) -> list[str]:
    def allowed(name: str) -> bool:
        homes = HOMES.get(name.split(".")[0])
        return homes is None or any(fnmatch(module, home) for home in homes)

    return [name for name in names if not allowed(name)]


def loaded_by(program: str) -> set[str]:
    """The packages that a process has loaded when it has run `program`."""
    ended = f"{program}; print(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", f"import sys; {ended}"], capture_output=True, text=True, check=True)
    return set(run.stdout.splitlines()[-1].split())


def test_every_module_is_in_a_known_layer():
    assert {Path(module).parts[0].removesuffix(".py") for module in MODULES} - {"__init__"} <= set(LEVEL)


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__.py"])
def test_imports_point_one_way(module):
    assert broken_layers(module, imports(module)) == []


@pytest.mark.parametrize("module", MODULES)
def test_heavy_packages_are_imported_only_where_they_belong(module):
    assert far_from_home(module, imports(module)) == []


def test_admission_is_pure_arithmetic():
    modules = [module for module in MODULES if module.startswith("admission/")]
    assert modules and not [name for m in modules for name in imports(m) if name.split(".")[0] == "numpy"]


def test_cupy_is_imported_lazily():
    for module in MODULES:
        top = ast.Module(
            [n for n in ast.parse((ROOT / module).read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)], []
        )
        assert not [name for name in imports(module, ast.unparse(top)) if name.split(".")[0] == "cupy"], module


@pytest.mark.parametrize("part", ["config", "cache", "admission", "cli"])
def test_planning_loads_nothing_heavy(part):
    loaded = loaded_by(f"import memra_pp.{part}")
    assert "memra_pp" in loaded and not set(HEAVY) & loaded


@pytest.mark.parametrize("options", ["", "--json"])
def test_the_plan_command_loads_nothing_heavy(data, options):
    argv = ["plan", str(data / "configs" / "qwen3_5-27b.json"), "--devices", "2x80GiB", "--ctx", "4096", *options.split()]
    loaded = loaded_by(f"import memra_pp.cli; assert memra_pp.cli.main({argv}) == 0")
    assert "memra_pp" in loaded and not set(HEAVY) & loaded


def test_the_status_command_loads_nothing_heavy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    loaded = loaded_by("import memra_pp.cli; assert memra_pp.cli.main(['status']) == 1")
    assert "memra_pp" in loaded and not set(HEAVY) & loaded


def test_help_loads_nothing_heavy():
    loaded = loaded_by("import memra_pp.cli\ntry: memra_pp.cli.main(['--help'])\nexcept SystemExit: pass\npass")
    assert "memra_pp" in loaded and not set(HEAVY) & loaded


@pytest.mark.parametrize(
    ("module", "line", "name"),
    [
        ("cache/cache.py", "from ..kernels import append", "memra_pp.kernels.append"),
        ("cache/cache.py", "from memra_pp.stage import worker", "memra_pp.stage.worker"),
        ("admission/ledger.py", "from .. import kernels", "memra_pp.kernels"),
        ("config/hf.py", "def f():\n    import memra_pp.cache.ring", "memra_pp.cache.ring"),
        ("errors.py", "from .config import ModelConfig", "memra_pp.config.ModelConfig"),
        ("stage/worker.py", "import importlib; importlib.import_module('..driver', __package__)", "memra_pp.driver"),
    ],
)
def test_an_import_that_points_back_is_seen(module, line, name):
    assert broken_layers(module, imports(module, line)) == [name]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("stage/worker.py", "import ray"),
        ("driver/session.py", "def f():\n    from ray.exceptions import RayError"),
        ("kernels/cpu.py", "import cupy as cp"),
        ("models/gemma3.py", "from numba import njit"),
        ("stage/frames.py", "import pickle"),
        ("driver/chain.py", "__import__('pickle')"),
    ],
)
def test_a_heavy_import_away_from_home_is_seen(module, line):
    assert far_from_home(module, imports(module, line))
