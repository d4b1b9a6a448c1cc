"""An archive that is still being written, read as far as its journal confirms it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats.dtypes import bits_of, dtype_of
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.keys import Key
from tensorcap_formats.output_path import journal_path, partial_path
from tensorcap_formats.writing import Writer, is_growing, open_growing

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def add(writer: Writer, name: str, factor: int) -> None:
    writer.add(Key(name, "output"), bits_of(X * np.float32(factor)), dtype_of(X), X.shape)


@pytest.mark.spec("VIEW-2")
def test_what_is_confirmed_is_there_with_values_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    writer = Writer(path, run={"framework": {"name": "torch"}})
    add(writer, "a", 1)
    add(writer, "b", 2)
    writer.add_value("0/b/input.mask", None)
    assert is_growing(path)
    with open_growing(path) as archive:
        assert [record.key.text for record in archive.records] == ["0/a/output", "0/b/output"]
        assert archive.load(archive.records[1]).tolist() == (X * 2).tolist()
        assert (archive.is_complete, archive.info.framework, archive.path) == (False, "torch", path)
        assert archive.values == {"0/b/input.mask": None}
        add(writer, "c", 3)
        assert len(archive) == 2
    with open_growing(path) as archive:
        assert len(archive) == 3
    writer.close()
    assert not is_growing(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.h5"]


@pytest.mark.spec("VIEW-2")
def test_bytes_that_are_gone_are_left_out_and_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    writer = Writer(path)
    add(writer, "a", 1)
    add(writer, "b", 2)
    copy = tmp_path / "copy.h5"
    partial_path(copy).write_bytes(partial_path(path).read_bytes()[:-1])
    journal_path(copy).write_bytes(journal_path(path).read_bytes() + b'{"torn')
    with open_growing(copy) as archive:  # as a writer that was killed leaves it
        assert [record.key.text for record in archive.records] == ["0/a/output"]
    journal_path(copy).write_text("no journal")
    with pytest.raises(CorruptArchiveError):
        open_growing(copy)
    writer.close()
