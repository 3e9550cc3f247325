"""The output matrix stays as narrow as its file holds it, and says the same."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from memra_pp.kernels import CpuDev
from memra_pp.kernels.panels import Q8_0
from memra_pp.models.parts import load_head, packed
from memra_pp.models.weights import open_weights

Q = gguf.GGMLQuantizationType
N_VOCAB, N_EMBD = 200, 64


@pytest.fixture(scope="module")
def device():
    dev = CpuDev()
    yield dev
    dev.close()


def head_of(path, device, tensors):
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(64)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(6)
    writer.add_head_count(2)
    writer.add_vocab_size(N_VOCAB)
    writer.add_sliding_window(16)
    writer.add_tensor("output_norm.weight", np.linspace(0.5, 2, N_EMBD, dtype=np.float32))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = open_weights(path)
    head = load_head(weights, "output.weight" not in tensors, 1e-6, device.backend)
    return head, weights.bytes_read


W = np.random.default_rng(0).standard_normal((N_VOCAB, N_EMBD), dtype=np.float32)


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight"])
@pytest.mark.parametrize("kind, form", [(Q.Q8_0, np.int8), (Q.Q5_0, np.int8), (Q.Q4_0, np.int8), (Q.BF16, np.uint16)])
def test_a_narrow_matrix_gives_the_logits_of_its_f32(tmp_path, device, name, kind, form):
    stored = gguf.quants.quantize(W, kind)
    kept, bytes_read = head_of(tmp_path / "narrow.gguf", device, {name: (stored, kind)})
    plain, _ = head_of(tmp_path / "f32.gguf", device, {name: (gguf.quants.dequantize(stored, kind), Q.F32)})
    assert kept.matrix.panels.dtype == form and plain.matrix.panels.dtype == np.float32
    assert bytes_read == stored.nbytes + 4 * N_EMBD
    for rows in (1, 3, 30):
        x = np.random.default_rng(rows).standard_normal((rows, N_EMBD), dtype=np.float32)
        np.testing.assert_array_equal(kept.logits(x, device.backend), plain.logits(x, device.backend))


@pytest.mark.parametrize("kind", [Q.F32, Q.Q5_1, Q.F16])
def test_other_types_are_f32(tmp_path, device, kind):
    head, _ = head_of(tmp_path / "m.gguf", device, {"token_embd.weight": (gguf.quants.quantize(W, kind), kind)})
    assert head.matrix.panels.dtype == np.float32


def test_parts_of_different_forms_are_one_matrix_in_f32(device):
    q8, bf16 = gguf.quants.quantize(W, Q.Q8_0).view(Q8_0), (W.view(np.uint32) >> 16).astype(np.uint16)
    parts = [q8, bf16, W]
    x = np.random.default_rng(0).standard_normal((3, N_EMBD), dtype=np.float32)
    whole = device.backend.matmul(x, packed(parts, device.backend))
    assert packed([q8, q8], device.backend).panels.dtype == np.int8
    alone = [device.backend.matmul(x, packed([part], device.backend)) for part in parts]
    np.testing.assert_array_equal(whole, np.concatenate(alone, axis=1))
