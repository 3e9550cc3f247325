"""How a checkpoint stores its elements, by its config: `dtype` and `quantization_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .fields import MAX_VOCAB, Fields, show
from .model import ModelConfig
from .weight_estimate import Tensor

_ELEMENTS: Mapping[str, tuple[str, int]] = {
    "bfloat16": ("bf16", 2),
    "float16": ("f16", 2),
    "float32": ("f32", 4),
    "float64": ("f64", 8),
}
"""A config's `dtype` -> its short name and bytes an element."""


@dataclass(frozen=True)
class Storage:
    """How a checkpoint stores its elements: `element` bytes each, but packable matrices as `packed(rows, cols)` bytes.

    `only` is a part that a packed tensor's name has to hold; the modules in `kept` are not packed.
    """

    label: str
    element: int
    packed: Callable[[int, int], int] | None = None
    only: str = ""
    kept: frozenset[str] = frozenset()

    def nbytes(self, tensor: Tensor) -> int:
        """Bytes of a tensor, scales included."""
        if self.packed is None or not tensor.packable or self.only not in tensor.name or self._keeps(tensor.name):
            return tensor.rows * tensor.cols * self.element
        return self.packed(tensor.rows, tensor.cols)

    def _keeps(self, name: str) -> bool:
        """Whether `kept` names the module or a module around it; `*` stands for a layer's number."""
        exact = module_name(name).removesuffix(".weight").split(".")
        starred = ["*" if part.isdigit() else part for part in exact]
        ends = [(a, b) for a in range(len(exact)) for b in range(a + 1, len(exact) + 1)]
        return bool(self.kept) and any(".".join(parts[a:b]) in self.kept for parts in (exact, starred) for a, b in ends)


def module_name(name: str) -> str:
    """A tensor's or module's name without the wrappers that checkpoints differ in, `model.` and `language_model.`."""
    while name.startswith(("model.", "language_model.")):
        name = name.partition(".")[2]
    return name


def storage_of(cfg: ModelConfig, where: str) -> Storage:
    """How the config says that the weights are stored: `dtype` (bf16 where none is named) and `quantization_config`.

    A quantisation that is not known here counts as none, which over-estimates; the label says so.

    Raises:
        ConfigError: a field of the wrong type or range, named.
    """
    f = Fields(cfg.arch, cfg.hparams, where)
    name = "dtype" if f.given("dtype") else "torch_dtype"
    dtype = f.raw.get(name) or "bfloat16"
    if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in _ELEMENTS:
        raise f.bad(name, f"one of {', '.join(_ELEMENTS)}")
    label, element = _ELEMENTS[dtype.removeprefix("torch.")]
    quant = f.inside("quantization_config")
    if not quant.raw:
        return Storage(label, element)
    listed = quant.raw.get("modules_to_not_convert") or ()
    if not isinstance(listed, (list, tuple)) or not all(isinstance(module, str) for module in listed):
        raise quant.bad("modules_to_not_convert", "a list of module names")
    kept = frozenset(module_name(module) for module in listed)
    match quant.raw.get("quant_method"):
        case "mxfp4":
            return Storage(f"{label}, experts mxfp4", element, _mxfp4, "experts.", kept)
        case "fp8":
            return Storage(f"{label}, matrices fp8", element, _fp8(quant), kept=kept)
        case "awq" | "gptq" as method:
            bits = quant.count("bits", most=8)
            return Storage(f"{label}, matrices {method} {bits} bit", element, _grouped(quant, bits), kept=kept)
        case other:
            return Storage(f"{label} (quantisation {show(other)} is not known here, so this is too much)", element)


def _mxfp4(rows: int, cols: int) -> int:
    """32 elements take 16 bytes and a scale of one."""
    return rows * -(-cols // 32) * 17


def _fp8(quant: Fields) -> Callable[[int, int], int]:
    """A byte an element, and an f32 scale a block of `weight_block_size`, or a row."""
    block = quant.raw.get("weight_block_size") or [1, MAX_VOCAB]
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise quant.bad("weight_block_size", "a list of two whole numbers above 0")
    return lambda rows, cols: rows * cols + 4 * -(-rows // block[0]) * -(-cols // block[1])


def _grouped(quant: Fields, bits: int) -> Callable[[int, int], int]:
    """`bits` an element, an f16 scale and a zero of `bits` a group of a row, an i32 group number a column (GPTQ)."""
    size = quant.count("group_size", least=-1)

    def packed(rows: int, cols: int) -> int:
        groups = rows * (-(-cols // size) if size > 0 else 1)
        return -(-(rows * cols + groups) * bits // 8) + 2 * groups + 4 * cols

    return packed
