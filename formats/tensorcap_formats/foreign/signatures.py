"""Formats that are known and not read: by their first bytes, by what a zip file or a folder has, by suffix.

A file of another program is refused by the name of its format and with a way to what is read: who is told
that it may hold raw numbers reads a container's header as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorcap_formats.errors import NotAnArchiveError

SIGNATURE_BYTES: Final = 512  # of a file, which hold all signatures

_UNPACK: Final = "Unpack it, and give what is in it."
_FRAMEWORK: Final = (
    "Load it with its own framework, and save the tensors as .npz (numpy.savez) or .safetensors."
)
_RUN: Final = (
    "It is a compiled program: run it, and save the tensors that it returns as .npz (numpy.savez), named as "
    "the layers."
)
_CAPTURE: Final = (
    "Capture a run of it first, and give the archive: tcap capture coreai FILE -o ARCHIVE (tcap show and "
    "tcap ls say what is in it)."
)
_CAPTURE_PROGRAM: Final = (
    "Capture a run of it first, and give the archive: tcap capture executorch FILE -o ARCHIVE."
)
_TABLE: Final = "Save its columns as .npz (numpy.savez)."
_NO_TENSORS: Final = "It holds no tensors: save what it shows as .npz (numpy.savez)."


@dataclass(frozen=True, slots=True)
class _Format:
    """A format that is known and not read.

    Attributes:
        name: As a part of the sentence `FILE is …`.
        advice: What to do instead, a sentence.
    """

    name: str
    advice: str


_BY_MAGIC: Final[tuple[tuple[int, bytes, _Format], ...]] = (  # offset and bytes
    (
        0,
        b"version https://git-lfs.github.com/spec/",
        _Format("a pointer of Git LFS, in the place of the file itself", "Fetch the file: git lfs pull"),
    ),
    *(
        (0, magic, _Format("a GGML file, from before GGUF", "Convert it to GGUF with llama.cpp's scripts."))
        for magic in (b"lmgg", b"fmgg", b"tjgg")
    ),
    (4, b"TFL3", _Format("a TensorFlow Lite model", _RUN)),
    (4, b"ET12", _Format("an ExecuTorch program", _CAPTURE_PROGRAM)),
    (4, b"ORTM", _Format("an ONNX Runtime model (.ort)", "Give the .onnx file that it was made of.")),
    (0, b"ftrt", _Format("a TensorRT engine", _RUN)),
    (0, b"ptrt", _Format("a TensorRT engine", _RUN)),
    (0, b"RKNN", _Format("an RKNN model", _RUN)),
    (
        0,
        b"MATLAB 5.0 MAT-file",
        _Format("a MATLAB file", "Save it as version 7.3, which is HDF5, or as .npz."),
    ),
    (0, b"PAR1", _Format("a Parquet file", _TABLE)),
    (0, b"ARROW1", _Format("an Arrow file", _TABLE)),
    (0, b"SQLite format 3\0", _Format("an SQLite data base", _TABLE)),
    (0, b"\x1f\x8b\x08", _Format("a gzip file", _UNPACK)),
    (0, b"\x28\xb5\x2f\xfd", _Format("a Zstandard file", _UNPACK)),
    (0, b"\xfd7zXZ\0", _Format("an xz file", _UNPACK)),
    (257, b"ustar", _Format("a tar file", _UNPACK)),
    (0, b"\x7fELF", _Format("a compiled program or library", _RUN)),
    (0, b"\x89PNG\r\n", _Format("a PNG image", _NO_TENSORS)),
    (0, b"\xff\xd8\xff", _Format("a JPEG image", _NO_TENSORS)),
    (0, b"%PDF-", _Format("a PDF document", _NO_TENSORS)),
)
_ALONE: Final = (  # formats that are read, but not as one file of a folder
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a .npy file"),
    (b"PK\3\4", "a zip file"),
)
_BZIP2: Final = re.compile(rb"BZh[1-9]1AY&SY")
_TEXT: Final = re.compile(rb"[\t\n\r\f\x20-\x7e]{16,}")
_PLAIN_TEXT: Final = _Format("a text file", "Save its numbers as .npy: numpy.save(FILE, numpy.loadtxt(TEXT))")
_BY_SUFFIX: Final[Mapping[str, _Format]] = {  # of formats that no first bytes identify
    ".ckpt": _Format("a checkpoint of a kind that is not known", _FRAMEWORK),
    ".engine": _Format("a TensorRT engine", _RUN),
    ".index": _Format("the index of a TensorFlow checkpoint", _FRAMEWORK),
    ".mlmodel": _Format("a Core ML model", _RUN),
    ".msgpack": _Format("a Flax checkpoint", _FRAMEWORK),
    ".pb": _Format("a TensorFlow graph", _FRAMEWORK),
    ".plan": _Format("a TensorRT engine", _RUN),
    ".caffemodel": _Format("a Caffe model", _FRAMEWORK),
}
_BY_MEMBERS: Final = (  # how the names of members of a zip file end, all of them
    (
        ("/constants.pkl", "/data.pkl", "/version"),
        "/code/",
        _Format(
            "a TorchScript program",
            "Save its weights: safetensors.torch.save_file(torch.jit.load(FILE).state_dict(), OUT)",
        ),
    ),
    (
        ("archive_format",),
        "",
        _Format(
            "a torch.export program (.pt2)",
            "Save its weights: safetensors.torch.save_file(torch.export.load(FILE).state_dict, OUT)",
        ),
    ),
    (("serialized_exported_program.json",), "", _Format("a torch.export program (.pt2)", _FRAMEWORK)),
    (("[Content_Types].xml",), "", _Format("an Office document", _NO_TENSORS)),
    (("META-INF/MANIFEST.MF",), "", _Format("a Java archive", _NO_TENSORS)),
)
_BY_FILES: Final = (  # names in a folder, any of which identifies it
    (("saved_model.pb",), _Format("a TensorFlow SavedModel", _FRAMEWORK)),
    (("main.mlirb",), _Format("a Core AI asset", _CAPTURE)),
    (
        ("main-universal.odix",),
        _Format("a compiled Core AI model", "Capture the .aimodel that it was compiled of."),
    ),
    (("model.mil", "coremldata.bin"), _Format("a compiled Core ML model", _RUN)),
    (("manifest.ocdbt", "_checkpoint_metadata"), _Format("an Orbax checkpoint of JAX", _FRAMEWORK)),
    ((".metadata",), _Format("a distributed checkpoint of torch", _FRAMEWORK)),
)
_CORE_ML_PACKAGE: Final = ("manifest.json", "data")


def refuse_known_file(path: Path, first: bytes) -> None:
    """Refuse a file of a known format that is not read.

    Args:
        path: Of the file, for the message, and for the suffix of formats without a signature.
        first: Its first bytes, `SIGNATURE_BYTES` or all if there are fewer.

    Raises:
        NotAnArchiveError: It is one; the message names the format.
    """
    for offset, magic, form in _BY_MAGIC:
        if first[offset : offset + len(magic)] == magic:
            raise _refusal(path, form)
    if _BZIP2.match(first):
        raise _refusal(path, _Format("a bzip2 file", _UNPACK))
    for magic, name in _ALONE:
        if first.startswith(magic):
            raise NotAnArchiveError(
                f"{path}: is {name}, which is no part of such a folder", hint="Give its own path."
            )


def refuse_other_file(path: Path, first: bytes) -> None:
    """Refuse a file that no reader takes: text, or of a format that only its suffix names.

    Args:
        path: Of the file.
        first: As for `refuse_known_file`.

    Raises:
        NotAnArchiveError: It is one; the message names the format.
    """
    if path.suffix.lower() in _BY_SUFFIX:
        raise _refusal(path, _BY_SUFFIX[path.suffix.lower()])
    if _TEXT.fullmatch(first):
        raise _refusal(path, _PLAIN_TEXT)


def refuse_known_zip(path: Path, members: Collection[str]) -> None:
    """Refuse a zip file of a known format that is not read.

    Args:
        path: Of the file.
        members: The names of its members.

    Raises:
        NotAnArchiveError: It is one; the message names the format.
    """
    for endings, folder, form in _BY_MEMBERS:
        if all(any(name.endswith(ending) for name in members) for ending in endings) and (
            not folder or any(folder in name for name in members)
        ):
            raise _refusal(path, form)


def refuse_known_folder(path: Path, names: Collection[str]) -> None:
    """Refuse a folder of a known format that is not read.

    Args:
        path: Of the folder.
        names: What is in it, in lower case.

    Raises:
        NotAnArchiveError: It is one; the message names the format.
    """
    for signs, form in _BY_FILES:
        if any(sign in names for sign in signs):
            raise _refusal(path, form)
    if path.suffix.lower() == ".mlpackage" or all(sign in names for sign in _CORE_ML_PACKAGE):
        raise _refusal(path, _Format("a Core ML package", _RUN))


def _refusal(path: Path, form: _Format) -> NotAnArchiveError:
    return NotAnArchiveError(f"{path}: is {form.name}, which is not read", hint=form.advice)
