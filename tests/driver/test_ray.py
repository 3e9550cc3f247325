"""The Ray backend: the same bits as in process, a death noticed and named, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import MARK, alive, marked
from test_exactness import long_run

import memra_pp
from memra_pp.errors import AdmissionError, ConfigError, StageError


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of this module's own, so that each launch joins it rather than start one."""
    import ray

    from memra_pp.driver.launch.ray_runtime import runtime

    runtime.acquire(8)
    yield
    runtime.release()
    assert not ray.is_initialized()


def pids(pipe: memra_pp.Pipeline) -> list[int]:
    return [stage["pid"] for stage in pipe.stats()["stages"]]


@pytest.mark.parametrize("options", [{"stages": 2, "threads": 2}, {"stages": 6, "threads": 1}])
def test_bits_past_ten_thousand_rows_equal_one_stage_in_process(cluster: None, tiny: Path, options: dict[str, Any]) -> None:
    alone = long_run(tiny, "", backend="local", stages=1, threads=1)
    np.testing.assert_array_equal(long_run(tiny, "all", backend="ray", **options), alone)


@pytest.mark.parametrize(("stages", "k", "recurrent"), [(2, 4, "replay"), (4, 8, "states")])
def test_speculation_over_actors_gives_the_text_of_plain_decoding(
    cluster: None, hybrid: Path, stages: int, k: int, recurrent: Any
) -> None:
    prompt = list(range(30, 60)) * 2
    with memra_pp.launch(hybrid, backend="local") as alone:
        plain = list(alone.generate(prompt, max_new_tokens=40))
    wrong = memra_pp.Draft(k=k, by=lambda tokens, most: [t ^ 1 for t in plain[len(tokens) - len(prompt) :][:most]])
    with memra_pp.launch(hybrid, stages=stages, policy=memra_pp.cache.KvPolicy(ring="all")) as pipe:
        for draft in (memra_pp.Draft(k=k, recurrent=recurrent), wrong):
            before = pipe.stats()
            assert list(pipe.generate(prompt, max_new_tokens=40, draft=draft)) == plain
            after = pipe.stats()
            feeds = after["traversals"] - before["traversals"] - 2  # one opens, one closes
            assert feeds == 1 + after["rounds"] - before["rounds"] and after["drafted"] > before["drafted"]


def test_speculation_on_the_real_weights_over_actors(cluster: None, gemma: Path) -> None:
    with memra_pp.launch(gemma, stages=2) as pipe:
        prompt = pipe.tokenizer.encode("1. Buy milk from the shop\n2. Buy bread from the shop\n3.")
        plain = list(pipe.generate(prompt, max_new_tokens=24))
        for draft in (memra_pp.Draft(k=8), memra_pp.Draft(k=3, by=lambda tokens, k: [5] * k)):
            assert list(pipe.generate(prompt, max_new_tokens=24, draft=draft)) == plain
        assert pipe.stats()["accepted"] > 5


def test_actors_hold_what_admission_gave_out_and_sessions_wait_for_one_another(cluster: None, hybrid: Path) -> None:
    """Two of three stages share a device: their slabs lie apart in one arena, which both map."""
    devices = ["cpu:0", "cpu:1", "cpu:0"]
    with memra_pp.launch(hybrid, stages=3, devices=devices, budget_bytes=[300_000, 300_000, 300_000]) as pipe:
        sessions = []
        with pytest.raises(AdmissionError, match="short"):
            while True:
                sessions.append(pipe.open([5, 6, 7], max_new_tokens=40))
                list(sessions[-1].generate(3))
        stats = pipe.stats()
        for device in stats["devices"]:
            assert device["reserved_bytes"] == device["allocated_bytes"] <= device["budget_bytes"]
            assert device["free_bytes"] == device["largest_free_bytes"]
        assert [d["stages"] for d in stats["devices"]] == [[0, 2], [1]] and len(sessions) == stats["sessions"] > 1
        threading.Timer(0.2, sessions[0].close).start()
        with pipe.open([5, 6, 7], max_new_tokens=40, timeout=60) as session:
            assert len(list(session.generate(3))) == 3
        for session in sessions:
            session.close()
        assert [d["reserved_bytes"] + d["allocated_bytes"] for d in pipe.stats()["devices"]] == [0, 0]


def test_a_killed_stage_that_is_not_to_be_replaced_is_named_and_the_pipeline_closes(cluster: None, tiny: Path) -> None:
    with memra_pp.launch(tiny, stages=3, recoveries=0) as pipe:
        session = pipe.open([5, 6, 7], max_new_tokens=8)
        session.prefill()
        stages = pids(pipe)
        os.kill(stages[1], signal.SIGKILL)
        with pytest.raises(StageError, match="stage 1"):
            for token in range(8):
                session.decode(token)
        with pytest.raises(StageError, match="stage 1"):
            pipe.open([1], max_new_tokens=1)
        session.close()
    assert not any(map(alive, stages))


def test_a_stopped_stage_is_noticed_by_its_silence(cluster: None, tiny: Path) -> None:
    with memra_pp.launch(tiny, stages=2, silence_timeout=1.5, recoveries=0) as pipe:
        stages = pids(pipe)
        os.kill(stages[0], signal.SIGSTOP)
        try:
            with pytest.raises(StageError, match="stage 0"), pipe.open([5, 6, 7], max_new_tokens=8) as session:
                session.prefill()
        finally:
            os.kill(stages[0], signal.SIGCONT)
    assert not any(map(alive, stages))


def test_an_exception_in_the_block_leaves_no_actor(cluster: None, tiny: Path) -> None:
    with pytest.raises(ZeroDivisionError), memra_pp.launch(tiny, stages=2) as pipe:
        stages = pids(pipe)
        pipe.open([5], max_new_tokens=1).prefill()
        raise ZeroDivisionError
    assert not any(map(alive, stages))


def test_weights_that_a_stage_cannot_read_are_the_callers_error(cluster: None, tiny: Path, tmp_path: Path) -> None:
    import json
    import struct

    blob = (tiny / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", blob[:8])[0]
    header = {k: v for k, v in json.loads(blob[8 : 8 + size]).items() if "layers.4.mlp.up" not in k}
    packed = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    (tmp_path / "model.safetensors").write_bytes(blob[:8] + packed + blob[8 + size :])
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"layers\.4\.mlp\.up_proj"):
        memra_pp.launch(tmp_path, stages=2)


def test_more_stages_than_the_cluster_has_cpus(cluster: None, tiny: Path) -> None:
    import ray

    with memra_pp.launch(tiny, stages=6), pytest.raises(ConfigError, match="CPU"):
        memra_pp.launch(tiny, stages=6, placement_timeout=1)
    assert ray.is_initialized()


def run_apart(code: str, tmp: Path, interrupt: bool = False) -> tuple[int, str]:
    """Runs a program in a process and a temporary directory of its own; its exit code and what it said. Nothing of it,
    process or file, may outlast it."""
    mark = uuid.uuid4().hex
    env = {**os.environ, MARK: mark, "TMPDIR": str(tmp), "PYTHONUNBUFFERED": "1"}
    # Whoever runs the tests in the background has them inherit that Ctrl-C is ignored.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    child = subprocess.Popen(
        [sys.executable, "-c", heeding + code],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    said = child.stdout.readline()
    if interrupt:
        child.send_signal(signal.SIGINT)
    rest = child.stdout.read()  # of the same reader: it may hold more lines than the first
    child.wait(timeout=120)
    assert marked(mark) == []
    assert list(tmp.iterdir()) == []
    return child.returncode, said + rest


def test_a_cluster_started_for_a_pipeline_listens_on_loopback_and_ends_with_it(tiny: Path) -> None:
    tmp = Path("/tmp") / f"m{uuid.uuid4().hex[:8]}"
    tmp.mkdir()
    code = f"""
import memra_pp, os, ray
from pathlib import Path
def listening():
    mine = {{os.readlink(fd) for p in Path("/proc").iterdir() if p.name.isdigit() and b"{MARK}" in read(p / "environ")
            for fd in links(p / "fd")}}
    rows = [line.split() for file in ("tcp", "tcp6") for line in (Path("/proc/net") / file).read_text().splitlines()[1:]]
    return {{r[1].split(":")[0] for r in rows if r[3] == "0A" and f"socket:[{{r[9]}}]" in mine}}
def read(path):
    try: return path.read_bytes()
    except OSError: return b""
def links(path):
    try: return [fd for fd in path.iterdir() if fd.is_symlink()]
    except OSError: return []
with memra_pp.launch({str(tiny)!r}, stages=2) as pipe:
    print(len(list(pipe.generate([5, 6, 7], max_new_tokens=3, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=())))))
    print(*listening())
print(ray.is_initialized())
"""
    status, said = run_apart(code, tmp)
    tmp.rmdir()
    assert status == 0, said
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    *_, generated, addresses, ray_on = said.splitlines()
    assert generated == "3"
    assert set(addresses.split()) <= loopback
    assert addresses
    assert ray_on == "False"


@pytest.mark.cluster  # five times Ray
def test_a_process_may_launch_again_with_its_own_ray_between(tiny: Path) -> None:
    tmp = Path("/tmp") / f"m{uuid.uuid4().hex[:8]}"
    tmp.mkdir()
    code = f"""
import memra_pp, ray
def texts():
    with memra_pp.launch({str(tiny)!r}, stages=2) as pipe:
        return list(pipe.generate([5, 6, 7], max_new_tokens=3, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=())))
first = texts()
assert texts() == first
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir={str(tmp / "own")!r})
assert texts() == first and ray.is_initialized()
ray.shutdown()
assert texts() == first
pipe = memra_pp.launch({str(tiny)!r}, stages=1)  # closed by nobody
import shutil; shutil.rmtree({str(tmp / "own")!r}, ignore_errors=True)
print("done")
"""
    status, said = run_apart(code, tmp)
    tmp.rmdir()
    assert status == 0, said
    assert said.splitlines()[-1] == "done"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.cluster)])
def test_a_driver_that_is_killed_leaves_no_process_and_no_file(tiny: Path, how: signal.Signals) -> None:
    tmp, mark = Path("/tmp") / f"m{uuid.uuid4().hex[:8]}", uuid.uuid4().hex
    tmp.mkdir()
    code = f"""
import memra_pp
with memra_pp.launch({str(tiny)!r}, stages=2) as pipe:
    for token in pipe.generate([5, 6, 7], max_new_tokens=16000, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=())):
        print(token, flush=True)
"""
    env = {**os.environ, MARK: mark, "TMPDIR": str(tmp)}
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert child.stdout is not None and child.stdout.readline().strip().isdigit()
    assert len(marked(mark)) > 5 and list(tmp.iterdir())
    child.send_signal(how)
    assert child.wait(60) == -how
    deadline = time.monotonic() + 60
    while (marked(mark) or list(tmp.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(mark) == [] and list(tmp.iterdir()) == []
    child.stdout.close()
    tmp.rmdir()


def test_ctrl_c_while_ray_starts_leaves_nothing(tiny: Path) -> None:
    tmp = Path("/tmp") / f"m{uuid.uuid4().hex[:8]}"
    tmp.mkdir()
    code = f"""
import memra_pp
memra_pp.launch({str(tiny)!r}, stages=2, progress=lambda text, done, of: print(text))
"""
    status, said = run_apart(code, tmp, interrupt=True)
    tmp.rmdir()
    assert status in (1, 130, -signal.SIGINT), said
    assert "KeyboardInterrupt" in said


def test_ctrl_c_in_the_middle_of_a_generation_leaves_nothing(tiny: Path) -> None:
    tmp = Path("/tmp") / f"m{uuid.uuid4().hex[:8]}"
    tmp.mkdir()
    code = f"""
import memra_pp
with memra_pp.launch({str(tiny)!r}, stages=2) as pipe:
    for token in pipe.generate([5, 6, 7], max_new_tokens=16000, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=())):
        print(token)
"""
    status, said = run_apart(code, tmp, interrupt=True)
    tmp.rmdir()
    assert status in (1, 130, -signal.SIGINT), said
    assert "KeyboardInterrupt" in said
