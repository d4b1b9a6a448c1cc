"""Archives of every version of the format are kept in `tests/data` as written, and read for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcap_formats.check import check_archive
from tensorcap_formats.open import open_archive

DATA = Path(__file__).parents[1] / "data"
# key, dtype, shape and bytes of each record, in execution order
RECORDS = [
    ("0/@root/input.input_ids", "int64", (1, 2), "0100000000000000 0200000000000000"),
    ("0/model.layers.2.mlp/input.x", "bfloat16", (2,), "803f 00c0"),
    ("0/model.layers.2.mlp/output", "float32", (2, 1), "0000803f 000000c0"),
    ("0/model.layers.10.mlp/input.x", "float32", (2, 1), "0000803f 000000c0"),
    ("0/act@1/output", "float8_e4m3fn", (3,), "38 7f 00"),
    ("0/act@1/output.mask", "bool", (2,), "01 00"),
    ("0/act@1/output.scale", "float64", (), "000000000000f03f"),
    ("0/act@1/output.none", "float16", (0, 4), ""),
    ("rank1/0/act/output", "complex64", (1,), "0000803f 00000040"),
]


@pytest.mark.parametrize("name", ["v1/small.h5", "v1/small.zarr", "v1/small.safetensors"])
def test_an_archive_of_an_old_version_is_read(name: str) -> None:
    with open_archive(DATA / name) as archive:
        tensors = [(r.key.text, r.dtype.name, r.shape, archive.read(r).tobytes()) for r in archive.records]
        assert tensors == [(k, d, s, bytes.fromhex(b)) for k, d, s, b in RECORDS]
        assert archive.values == {"0/act@1/input.cache": None, "0/act@1/input.layer": 3}
        assert archive.run == {"model": {"class": "example.Model"}, "steps": 1}
        assert archive.is_complete
        assert archive.is_ordered
        assert archive.get("act@1/output.scale").statistics is not None
        assert check_archive(archive).problems == []
