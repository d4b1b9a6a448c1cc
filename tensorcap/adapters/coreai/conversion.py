"""A model as a Core AI asset: loaded, or exported and converted from torch."""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.export import ExportedProgram

from tensorcap.adapters.coreai.engine import AIModelAsset, TorchConverter, get_decomp_table, quiet
from tensorcap.adapters.coreai.model import ASSET_SUFFIX, CoreAIModel
from tensorcap.adapters.coreai.operation_map import OperationMap
from tensorcap.adapters.torch.export import exported
from tensorcap.workload import class_name
from tensorcap_formats.errors import CaptureError, ReadError, UsageError, abbreviate

_MAGIC: Final = b"ML\xefR"


@dataclass(frozen=True)
class Converted:
    """An asset that can be run.

    Attributes:
        asset: The asset.
        path: Where it is.
        program: The decomposed program that it was converted from; None for an asset of a file.
    """

    asset: Any
    path: Path
    program: Any = None

    @cached_property
    def operation_map(self) -> OperationMap:
        """The operations of the asset."""
        with quiet():
            asset_program = self.asset.program
            return OperationMap(asset_program, self.program)


def converted(model: CoreAIModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Converted:
    """The model's asset; a conversion is made once, for the shapes of its first arguments.

    Raises:
        UsageError: The source is no asset, module or program, or has another precision.
        CaptureError: torch cannot export the module, or Core AI cannot convert it.
    """
    if not model.converted:
        model.converted.append(_load(model) if model.is_asset else _convert(model, args, kwargs))
    result: Converted = model.converted[0]
    return result


def save(model: CoreAIModel, path: Path) -> None:
    """Copy the asset that a model was converted to.

    Raises:
        UsageError: It was not converted yet.
    """
    if not model.converted:
        raise UsageError(f"{path}: the model was not converted yet, expected a run before")
    shutil.copytree(model.converted[0].path, path)


def _load(model: CoreAIModel) -> Converted:
    path = Path(model.source)
    if path.suffix != ASSET_SUFFIX or not (path / "main.mlirb").is_file():
        what = "a folder without main.mlirb" if path.is_dir() else "a file" if path.exists() else "nothing"
        raise UsageError(f"{path}: found {what}, expected a Core AI asset, a folder NAME{ASSET_SUFFIX}")
    _check_bytes(path)
    for name in ("precision", "mode"):
        value = getattr(model, name)
        if value is not None:
            raise UsageError(
                f"{path}: {name} {value}: an asset has the {name} it was converted in",
                hint="Give the module that it was converted from.",
            )
    try:
        with quiet():
            asset = AIModelAsset.load(path)
            _ = asset.program  # which reads it
    except Exception as error:
        raise ReadError(f"{path}: Core AI cannot load it: {_reason(error)}") from error
    return Converted(asset, path)


def _check_bytes(path: Path) -> None:
    """Refuse a damaged asset: Core AI ends the whole process where it cannot parse one.

    Raises:
        ReadError: The program is not the one that the asset has the SHA-256 of, or is no MLIR bytecode.
    """
    program, expected = path / "main.mlirb", path / "main.hash"
    with program.open("rb") as file:
        start = file.read(len(_MAGIC))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").digest()
    if start != _MAGIC:
        raise ReadError(f"{program}: found {start!r}, expected MLIR bytecode, which begins with {_MAGIC!r}")
    if expected.is_file() and expected.read_bytes() != digest:
        raise ReadError(f"{program}: is damaged: found another SHA-256 than {expected.name} has")


def _convert(model: CoreAIModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Converted:
    """Export, decompose, convert, and save to a temporary folder."""
    source = model.source
    name = class_name(source)
    if not isinstance(source, torch.nn.Module | ExportedProgram):
        raise UsageError(f"{name}: expected an .aimodel path, a torch module or an ExportedProgram")
    if isinstance(source, ExportedProgram) and model.precision is not None:
        raise UsageError(
            f"{name}: precision {model.precision}: a program has the one it was exported in",
            hint="Give the module that it was exported from.",
        )
    mode = TorchConverter.Mode.RELEASE if model.mode == "release" else TorchConverter.Mode.DEBUG
    try:
        with quiet(), torch.no_grad():
            if isinstance(source, torch.nn.Module):
                half = model.precision == "fp16"
                module = copy.deepcopy(source).half() if half else source
                args = tuple(_tensor(value, half=half) for value in args)
                kwargs = {key: _tensor(value, half=half) for key, value in kwargs.items()}
                program, _ = exported(module, args, dict(kwargs), "coreai")
            else:
                program = decompose(source)
            converter = TorchConverter(mode=mode).add_exported_program(
                program, entrypoint_name=model.function
            )
            folder = tempfile.mkdtemp(prefix="tcap-coreai-")
            weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder) / f"model{ASSET_SUFFIX}"
            converter.to_coreai().save_asset(path)
            return Converted(AIModelAsset.load(path), path, program)
    except Exception as error:
        raise CaptureError(f"{name}: cannot be converted to Core AI: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {abbreviate(str(error).strip().partition(chr(10))[0], 300)}"


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Decompose an exported graph with Core AI's own table, as before a conversion."""
    with quiet():
        result: ExportedProgram = program.run_decompositions(get_decomp_table())
    return result


def _tensor(value: Any, *, half: bool) -> Any:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.ascontiguousarray(value))
    if half and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.half()
    return value
