"""A model as a Core AI asset: loaded, or exported and converted from torch."""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from tensorcap.adapters.coreai.engine import AIModelAsset, TorchConverter, get_decomp_table, quiet
from tensorcap.adapters.coreai.model import CoreAIModel
from tensorcap.workload import class_name
from tensorcap_formats.errors import CaptureError, UsageError, abbreviate


@dataclass(frozen=True)
class Converted:
    """An asset that can be run.

    Attributes:
        asset: The asset.
        program: The decomposed program that it was converted from; None for an asset of a file.
    """

    asset: Any
    program: Any = None


def converted(model: CoreAIModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Converted:
    """The model's asset; a conversion is made once, for the shapes of its first arguments.

    Raises:
        UsageError: The source is no asset, module or program, or has another precision.
        CaptureError: torch cannot export the module, or Core AI cannot convert it.
    """
    if not model.converted:
        if isinstance(model.source, str | Path):
            model.converted.append(Converted(_load(Path(model.source), model)))
        else:
            model.converted.append(_convert(model, args, kwargs))
    result: Converted = model.converted[0]
    return result


def _load(path: Path, model: CoreAIModel) -> Any:
    if path.suffix != ".aimodel" or not (path / "main.mlirb").is_file():
        what = "a folder without main.mlirb" if path.is_dir() else "a file" if path.exists() else "nothing"
        raise UsageError(f"{path}: found {what}, expected a Core AI asset, a folder NAME.aimodel")
    if model.precision is not None:
        raise UsageError(
            f"{path}: precision {model.precision}: an asset has the precision it was converted in",
            hint="Give the module that it was converted from.",
        )
    with quiet():
        return AIModelAsset.load(path)


def _convert(model: CoreAIModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Converted:
    """Export, decompose, convert, and save to a temporary folder."""
    source = model.source
    name = class_name(source)
    mode = TorchConverter.Mode.DEBUG if model.mode == "debug" else TorchConverter.Mode.RELEASE
    try:
        with quiet(), torch.no_grad():
            program = source
            if isinstance(source, torch.nn.Module):
                half = model.precision == "fp16"
                module = copy.deepcopy(source).half() if half else source
                args = tuple(_tensor(value, half=half) for value in args)
                kwargs = {key: _tensor(value, half=half) for key, value in kwargs.items()}
                program = torch.export.export(module, args, dict(kwargs), strict=False)
            elif not isinstance(source, ExportedProgram):
                raise UsageError(f"{name}: expected an .aimodel path, a torch module or an ExportedProgram")
            elif model.precision is not None:
                raise UsageError(
                    f"{name}: precision {model.precision}: a program has the one it was exported in",
                    hint="Give the module that it was exported from.",
                )
            program = decompose(program)
            converter = TorchConverter(mode=mode).add_exported_program(
                program, entrypoint_name=model.function
            )
            folder = tempfile.mkdtemp(prefix="tcap-coreai-")
            weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
            path = Path(folder) / "model.aimodel"
            converter.to_coreai().save_asset(path)
            return Converted(AIModelAsset.load(path), program)
    except UsageError:
        raise
    except Exception as error:
        reason = abbreviate(str(error).strip().partition("\n")[0], 300)
        raise CaptureError(
            f"{name}: cannot be converted to Core AI: {type(error).__name__}: {reason}"
        ) from error


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
