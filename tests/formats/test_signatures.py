"""Files of other programs are refused by the name of their format; all else may be raw numbers."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats.errors import NotAnArchiveError, ReadError
from tensorcap_formats.open import open_archive

REST = np.random.default_rng(0).bytes(200)


def tar() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        file.addfile(tarfile.TarInfo("weights.ckpt"))
    return content.getvalue()


def zip_of(*names: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name in names:
            file.writestr(name, "")
    return content.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
FILES: dict[str, tuple[str, bytes, str]] = {  # name, bytes, what the message calls it
    "pointer": ("model.safetensors", POINTER, "a pointer of Git LFS"),
    "pointer-to-torch": ("pytorch_model.bin", POINTER, "a pointer of Git LFS"),
    "tflite": ("net.tflite", b"\x1c\0\0\0TFL3" + REST, "a TensorFlow Lite model"),
    "tflite-without-suffix": ("net", b"\x1c\0\0\0TFL3" + REST, "a TensorFlow Lite model"),
    "executorch": ("net.pte", b"\x1c\0\0\0ET12" + REST, "an ExecuTorch program"),
    "ort": ("net.ort", b"\x1c\0\0\0ORTM" + REST, "an ONNX Runtime model"),
    "tensorrt": ("net.bin", b"ptrt" + REST, "a TensorRT engine"),
    "tensorrt-plan": ("net.plan", REST, "a TensorRT engine"),
    "ggml": ("ggml-model.bin", b"lmgg" + REST, "a GGML file"),
    "core-ml": ("net.mlmodel", b"\x08\x04" + REST, "a Core ML model"),
    "tensorflow": ("frozen.pb", b"\x0a\x10" + REST, "a TensorFlow graph"),
    "flax": ("flax_model.msgpack", b"\x81\xa6" + REST, "a Flax checkpoint"),
    "matlab": ("x.mat", b"MATLAB 5.0 MAT-file, Platform: GLNXA64" + REST, "a MATLAB file"),
    "parquet": ("x.parquet", b"PAR1" + REST, "a Parquet file"),
    "gzip": ("x.npy.gz", b"\x1f\x8b\x08\0" + REST, "a gzip file"),
    "bzip2": ("x.bz2", b"BZh91AY&SY" + REST, "a bzip2 file"),
    "zstd": ("x.pt", b"\x28\xb5\x2f\xfd" + REST, "a Zstandard file"),
    "tar": ("x.nemo", tar(), "a tar file"),
    "png": ("x.max", b"\x89PNG\r\n\x1a\n" + REST, "a PNG image"),
    "text": ("x.csv", b"0.5,1.25,3\n" * 20, "a text file"),
    "torchscript": (
        "net.pt",
        zip_of("net/data.pkl", "net/constants.pkl", "net/version", "net/code/__torch__.py"),
        "a TorchScript program",
    ),
    "export": ("net.pt2", zip_of("net/archive_format", "net/models/model.json"), "a torch.export program"),
    "office": ("x.xlsx", zip_of("[Content_Types].xml", "xl/workbook.xml"), "an Office document"),
}
FOLDERS = {
    "saved-model": (["saved_model.pb", "variables"], "a TensorFlow SavedModel"),
    "core-ml-package": (["Manifest.json", "Data"], "a Core ML package"),
    "orbax": (["_METADATA", "manifest.ocdbt", "d"], "an Orbax checkpoint"),
    "distributed": ([".metadata", "__0_0.distcp"], "a distributed checkpoint of torch"),
}


@pytest.mark.spec("ARC-81")
@pytest.mark.parametrize("kind", list(FILES))
def test_a_file_of_a_known_format_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    name, content, called = FILES[kind]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(NotAnArchiveError) as caught:
        open_archive(path)
    assert str(caught.value).startswith(f"{path}: is {called}")
    assert caught.value.hint
    assert "raw numbers" not in caught.value.hint


@pytest.mark.spec("ARC-81")
@pytest.mark.parametrize("kind", list(FOLDERS))
def test_a_folder_of_a_known_format_is_refused_by_its_name(kind: str, tmp_path: Path) -> None:
    names, called = FOLDERS[kind]
    for name in names:
        (tmp_path / name).write_bytes(b"\x0a\x10")
    with pytest.raises(NotAnArchiveError) as caught:
        open_archive(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: is {called}")


@pytest.mark.parametrize("suffix", ["", ".bin", ".max"])
def test_only_a_file_of_no_known_format_may_hold_raw_numbers(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(np.array([0.5, 1.25, -3], "<f4").tobytes())
    with pytest.raises(NotAnArchiveError) as caught:
        open_archive(path)
    assert caught.value.hint == f"If it holds raw numbers, say which: x{suffix}:float32:2,3"


@pytest.mark.parametrize("content", [b"GGUF\3\0\0\0", b"\x89HDF\r\n\x1a\n", b"\x93NUMPY\1\0"], ids=repr)
@pytest.mark.parametrize("suffix", [".bin", ".max"])
def test_a_known_file_in_a_folder_of_others_is_no_raw_numbers(
    content: bytes, suffix: str, tmp_path: Path
) -> None:
    (tmp_path / f"a{suffix}").write_bytes(content + REST)
    try:
        with open_archive(tmp_path) as archive:
            problems = " ".join(archive.skipped.values())
    except ReadError as error:
        problems = f"{error} {error.hint}"
    assert "is no part of such a folder" in problems
    assert "raw numbers" not in problems


def test_a_folder_of_files_that_are_opened_one_by_one_names_one(tmp_path: Path) -> None:
    for name in ("net-00001-of-00002.gguf", "net-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(NotAnArchiveError, match="holds nothing that is one of") as caught:
        open_archive(tmp_path)
    assert caught.value.hint == f"Name one file, as {tmp_path}/net-00001-of-00002.gguf"


@pytest.mark.spec("ARC-81")
@pytest.mark.parametrize(
    ("name", "content", "message", "extra"),
    [
        pytest.param(
            "a.bin", b"GGUF\3\0\0\0", "a GGUF file, which is read by the package 'gguf'", "gguf", id="gguf"
        ),
        pytest.param("a.onnx", b"", "an ONNX model, which is read by the package 'onnx'", "onnx", id="onnx"),
        pytest.param(
            "a", b"\x08\x08\x12\x07pytorch", "an ONNX model, which is read by", "onnx", id="onnx-by-content"
        ),
        pytest.param(
            "a", b"\x08\x0a\x3a\x90\x05", "an ONNX model, which is read by", "onnx", id="onnx-graph"
        ),
    ],
)
def test_a_file_whose_package_is_absent_says_which_extra_brings_it(
    name: str, content: bytes, message: str, extra: str, tmp_path: Path, without: Callable[[str], None]
) -> None:
    without(extra)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(NotAnArchiveError) as caught:
        open_archive(tmp_path / name)
    assert message in str(caught.value)
    assert caught.value.exit_status == 3
    assert caught.value.hint == f"Install it with: pip install 'tensorcap[{extra}]'"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hides a package, whether it is installed or not."""

    def hide(package: str) -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == package or name == f"tensorcap_formats.foreign.{package}_file":
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return hide
