"""What a GPU is called, however devices are numbered."""

from __future__ import annotations

import pytest

from memra_pp.kernels.cuda.gpu import identity


@pytest.mark.parametrize(
    ("properties", "called"),
    [
        ({"uuid": bytes(range(1, 17))}, "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"),
        ({"uuid": b"\x01\x02"}, "0000:3B:00.0"),
        ({}, "0000:3B:00.0"),
    ],
)
def test_a_uuid_if_it_is_whole_else_the_place_on_the_bus(properties: dict[str, bytes], called: str) -> None:
    assert identity(properties, "0000:3B:00.0") == called
