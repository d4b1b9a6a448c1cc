"""ONNX test data sets: a folder `test_data_set_0` beside a model, with `input_N.pb` and `output_N.pb`."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import onnx
from google.protobuf.message import DecodeError

from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError
from tensorcap_formats.folder import list_folder, others_below, refuse_link_out
from tensorcap_formats.foreign.onnx_file import foreign_tensor, tensor_name
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.keys import ROOT_SITE, Key, escape

_NOT_OF_IT: Final = "no input_N.pb or output_N.pb"
_FILE: Final = re.compile(r"(input|output)_(\d+)\.pb")


def open_test_data(path: Path) -> Archive:
    """Open a test data set: inputs and outputs of the model, by the names in the files.

    Raises:
        CorruptArchiveError: A file is no tensor, contradicts itself, or has the name of another one.
        NotAnArchiveError: A file holds no numbers.
        UnsafeFileError: A file is a link out of the folder.
    """
    matches = [match for name in list_folder(path) if (match := _FILE.fullmatch(name))]
    matches.sort(key=lambda match: (match[1], int(match[2])))
    outputs = [match for match in matches if match[1] == "output"]
    tensors: list[ForeignTensor] = []
    for match in matches:
        refuse_link_out(path / match[0], path, hint="Put a copy in its place.")
        stored = _load(path / match[0])
        name = tensor_name(stored) or match[0].removesuffix(".pb")
        is_alone = match[1] == "output" and len(outputs) == 1
        slot = "output" if is_alone else f"{match[1]}.{escape(name)}"
        tensors.append(foreign_tensor(path / match[0], Key(ROOT_SITE, slot, 0, 0).text, stored))
    others = others_below(path, [path / match[0] for match in matches], _NOT_OF_IT)
    return ForeignArchive(path, "onnx-test-data", tensors, skipped=others, is_ordered=True)


def _load(path: Path) -> Any:
    """The tensor of a file."""
    with closing(InputFile(path)) as file:
        data = file.read(0, file.size)
    stored = onnx.TensorProto()
    try:
        stored.ParseFromString(data)
    except (DecodeError, ValueError) as error:
        raise CorruptArchiveError(f"{path}: is no ONNX tensor: {' '.join(str(error).split())}") from None
    if stored.data_type == onnx.TensorProto.UNDEFINED:
        raise CorruptArchiveError(
            f"{path}: is no ONNX tensor, as a sequence or a map is none; expected tensors"
        )
    if stored.data_type == onnx.TensorProto.STRING:
        raise NotAnArchiveError(f"{path}: is an array of text, expected numbers")
    if stored.data_location == onnx.TensorProto.EXTERNAL:
        raise NotAnArchiveError(f"{path}: keeps its values in another file, expected them in this one")
    return stored
