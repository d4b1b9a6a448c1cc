"""Logs of prints that were damaged: what is left is read, or refused in one line."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest

from tensorcap_formats.errors import ReadError
from tensorcap_formats.open import open_archive
from tests.formats.test_print_log import COMPACT, FULL

PIECES = (
    b"[",
    b"]",
    b"(",
    b")",
    b",",
    b" = tensor(",
    b"=",
    b"\n",
    b"\0",
    b"\xff",
    b"e",
    b"-",
    b"9" * 5000,
    b"..., ",
)


@pytest.mark.parametrize("text", [COMPACT, FULL], ids=["compact", "full"])
def test_damage_is_left_out_or_refused(tmp_path: Path, text: str) -> None:
    rng, whole = random.Random(7), text.encode()
    path = tmp_path / "max.log"
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(damaged))
            damaged[at : at + rng.choice((0, 1, 3, 40))] = rng.choice(PIECES)
        path.write_bytes(damaged)
        with suppress(ReadError), open_archive(path) as archive:
            for record in archive.records:
                assert archive.load(record).shape == record.shape


def test_a_shape_of_digits_without_end_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "max.log"
    path.write_bytes(b"x = tensor<" + b"9" * 6000 + b"xf32> [1.0]\ny = tensor<1xf32> [1.000000e+00]\n")
    with open_archive(path) as archive:
        assert [record.key.text for record in archive.records] == ["0/probe:y/value"]
