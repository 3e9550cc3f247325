"""Safetensors headers: what is read, and what is refused."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memra_pp.config.safetensors_file import open_safetensors
from memra_pp.errors import ConfigError


def blob(header, data=b"", length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2, 2), at=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(at)}


def test_one_file(tmp_path):
    header = {"b": entry(at=(4, 20)), "a": entry("BF16", (2,), (0, 4)), "__metadata__": {"format": "pt"}}
    path = tmp_path / "m.safetensors"
    path.write_bytes(blob(header, bytes(20)))
    start = len(json.dumps(header)) + 8
    for found in (open_safetensors(path), open_safetensors(tmp_path)):
        assert {n: (t.shape, t.dtype, t.offset - start, t.nbytes) for n, t in found.items()} == {
            "a": ((2,), "BF16", 0, 4),
            "b": ((2, 2), "F32", 4, 16),
        }


@pytest.fixture
def sharded(tmp_path):
    (tmp_path / "one.safetensors").write_bytes(blob({"a": entry()}, bytes(16)))
    (tmp_path / "two.safetensors").write_bytes(blob({"b": entry()}, bytes(16)))

    def index(weight_map):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return open_safetensors(tmp_path)

    return index


def test_shards(sharded, tmp_path):
    found = sharded({"a": "one.safetensors", "b": "two.safetensors"})
    assert {n: t.file.name for n, t in found.items()} == {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / "model.safetensors.index.json").unlink()
    assert sorted(open_safetensors(tmp_path)) == ["a", "b"]
    (tmp_path / "three.safetensors").write_bytes(blob({"b": entry()}, bytes(16)))
    with pytest.raises(ConfigError, match=r"'b' is in three\.safetensors too"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("file", ["../one.safetensors", "/etc/x.safetensors", "..", "a\\b.safetensors", "one.bin", 3, None])
def test_an_index_names_only_files_beside_it(sharded, file):
    with pytest.raises(ConfigError, match=r"not a \*\.safetensors file of this directory"):
        sharded({"a": file})


@pytest.mark.parametrize(
    "weight_map,message",
    [
        ({"a": "two.safetensors"}, "does not hold it"),
        ({"c": "one.safetensors"}, "does not hold it"),
        ({"a": "gone.safetensors"}, "cannot be read"),
        ({}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_an_index_that_contradicts_its_files(sharded, weight_map, message):
    with pytest.raises(ConfigError, match=message):
        sharded(weight_map)


DAMAGE = [
    (b"", "cut short"),
    (b"\x05", "cut short"),
    (blob({}, length=1 << 60), "more than 100000000"),
    (blob({}, length=50), "cut short"),
    (blob(b"{" * 100000), "not JSON"),
    (blob(b"[1]"), "not a JSON object"),
    (blob(b'{"a":1,"a":2}'), "twice"),
    (blob({"a": 1}), "not a tensor's entry"),
    (blob({"a": entry("F3")}, bytes(16)), "dtype 'F3'"),
    (blob({"a": entry(["F32"])}, bytes(16)), "dtype"),
    (blob({"a": {**entry(), "shape": [2, -2]}}, bytes(16)), "shape"),
    (blob({"a": {**entry(), "shape": [2, True]}}, bytes(16)), "shape"),
    (blob({"a": {**entry(), "shape": None}}, bytes(16)), "shape"),
    (blob({"a": entry(shape=(2, 3))}, bytes(16)), "cannot take 16 bytes"),
    (blob({"a": entry(shape=(1 << 61, 1 << 61))}, bytes(16)), "cannot take 16 bytes"),
    (blob({"a": entry(at=(0, 17))}, bytes(16)), "data_offsets"),
    (blob({"a": entry(at=(16, 0))}, bytes(16)), "data_offsets"),
    (blob({"a": entry(at=(-16, 0))}, bytes(16)), "data_offsets"),
    (blob({"a": entry(at=(0, 16, 3))}, bytes(16)), "data_offsets"),
    (blob({"a": entry(), "b": entry(at=(8, 24))}, bytes(24)), "overlap"),
]


@pytest.mark.parametrize("data,message", DAMAGE, ids=[m for _, m in DAMAGE])
def test_damage_is_named(tmp_path, data, message):
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as e:
        open_safetensors(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzz(tmp_path, data):
    raw = bytearray(blob({"b": entry(at=(4, 20)), "a": entry("BF16", (2,), (0, 4))}, bytes(20)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)) | st.just(len(raw)))])
    try:
        for t in open_safetensors(path).values():
            assert t.offset + t.nbytes <= len(raw)
    except ConfigError as e:
        assert "\n" not in str(e)


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match=r"no model\.safetensors\.index\.json and no"):
        open_safetensors(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_safetensors(tmp_path / "none.safetensors")
