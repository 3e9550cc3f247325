"""`examples/custom_stage.py`: it runs as it is, and the model in it is one, on any number of stages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import memra_pp

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_stage.py"
PERIOD = "stages hold rows, "


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        import custom_stage
    finally:
        sys.path.remove(str(EXAMPLE.parent))
    return custom_stage


@pytest.fixture(scope="module")
def model(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    example.write_model(folder)
    return folder


@pytest.mark.parametrize("stages", [2, 3])
def test_what_repeats_goes_on_with_the_same_bits_on_any_number_of_stages(example: ModuleType, model: Path, stages: int) -> None:
    text = PERIOD + PERIOD[:7]
    alone, said = example.run(model, text, backend="local", stages=1)
    assert (text + said).startswith(PERIOD * 4)
    apart, again = example.run(model, text, backend="local", stages=stages)
    np.testing.assert_array_equal(apart, alone)
    assert again == said


def test_who_shares_the_batch_does_not_matter(example: ModuleType, model: Path) -> None:
    prompts = [[example.LETTERS.index(letter) for letter in PERIOD + PERIOD[:n]] for n in (3, 7, 12)]
    with memra_pp.launch(model, stage_model=example.Induction, backend="local", stages=2) as pipe:
        alone = [list(pipe.generate(prompt, max_new_tokens=24)) for prompt in prompts]
        texts: list[list[int]] = [[] for _ in prompts]
        for index, token in pipe.generate_many(prompts, max_new_tokens=24):
            texts[index].append(token)
    assert texts == alone and len(set(map(tuple, alone))) == len(prompts)


@pytest.mark.cluster
def test_the_example_runs_over_ray() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tage, and then more; one stage, and then more;") == 2
    assert done.stdout.splitlines()[-1] == "31 rows of 32 logits and 64 tokens: the same bits"
