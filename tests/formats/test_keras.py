"""Keras files: weights as Keras 2 and 3 lay them out in HDF5, alone or in the zip file of a whole model."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError
from tensorcap_formats.open import open_archive

KERNEL = np.arange(12, dtype=np.float32).reshape(3, 4)


def weights() -> bytes:
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file["layers/dense/vars/0"] = KERNEL
        file["layers/dense/vars/1"] = np.array([1, 2, 3, 4], np.float32)
        file["layers/dense_1/vars/0"] = np.array([5], np.float16)
        file["layers/dense"].attrs["name"] = "dense"
        file.create_dataset("optimizer/vars/0", data=KERNEL, chunks=(1, 4), compression="gzip")
    return content.getvalue()


def write(path: Path, content: bytes, *, method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("metadata.json", '{"keras_version": "3.10.0"}')
        file.writestr("config.json", "{}")
        file.writestr("model.weights.h5", content)
    return path


@pytest.mark.spec("ARC-84")
@pytest.mark.parametrize("name", ["net.keras", "net.zip"])
def test_the_weights_of_a_whole_model_open(name: str, tmp_path: Path) -> None:
    with open_archive(write(tmp_path / name, weights())) as archive:
        values = {record.key.text: archive.load(record).tolist() for record in archive.records}
        assert archive.container == "keras"
        assert sorted(archive.skipped) == ["config.json", "metadata.json"]
    assert values == {
        "layers/dense/vars/0": KERNEL.tolist(),
        "layers/dense/vars/1": [1, 2, 3, 4],
        "layers/dense_1/vars/0": [5],
        "optimizer/vars/0": KERNEL.tolist(),
    }


def test_weights_alone_open_in_the_layouts_of_keras_2_and_3(tmp_path: Path) -> None:
    (tmp_path / "net.weights.h5").write_bytes(weights())
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["model_weights/dense/dense/kernel:0"] = KERNEL
        file.attrs["keras_version"] = "2.15.0"
    for name, key in (
        ("net.weights.h5", "layers/dense/vars/0"),
        ("old.h5", "model_weights/dense/dense/kernel:0"),
    ):
        with open_archive(tmp_path / name) as archive:
            assert archive.load(archive.get(key)).tolist() == KERNEL.tolist()


def test_weights_that_are_no_hdf5_or_compressed_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(NotAnArchiveError, match="its weights are no HDF5 file"):
        open_archive(write(tmp_path / "a.keras", b"no weights"))
    with pytest.raises(NotAnArchiveError, match="its weights are compressed") as caught:
        open_archive(write(tmp_path / "b.keras", weights(), method=zipfile.ZIP_DEFLATED))
    assert caught.value.hint == "Unpack model.weights.h5, and give that."
    with pytest.raises(CorruptArchiveError):
        open_archive(write(tmp_path / "c.keras", weights()[:900]))


def test_a_damaged_model_is_an_error_or_opens(tmp_path: Path) -> None:
    whole, path = write(tmp_path / "whole.keras", weights()).read_bytes(), tmp_path / "net.keras"
    draw = np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[int(draw.integers(0, len(damaged)))] ^= int(draw.integers(1, 256))
        path.write_bytes(damaged)
        try:
            with open_archive(path) as archive:
                for record in archive.records:
                    archive.load(record)
        except ReadError:
            pass
