"""How a source becomes a Core AI program, and how a program runs: by the packages' public functions."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coreai.runtime
import numpy as np
import torch
from torch import nn

from tensorcap_formats.dtypes import Array
from tests.coreai.models import Inputs

if TYPE_CHECKING:
    from torch.export import ExportedProgram

with warnings.catch_warnings():  # at import it takes torch 2.13.0+cpu for one newer than 2.13.0
    warnings.filterwarnings("ignore", "coreai-torch has only been validated")
    from coreai_torch import TorchConverter, get_decomp_table


def exported(module: nn.Module, inputs: Inputs) -> ExportedProgram:
    """The program of a module, in the operations that the converter takes."""
    with torch.no_grad():
        program = torch.export.export(module, (), dict(inputs))
        decomposed: ExportedProgram = program.run_decompositions(get_decomp_table())
    return decomposed


def converted(program: ExportedProgram) -> Any:
    return TorchConverter().add_exported_program(program).to_coreai()


def outputs(program: Any, inputs: Inputs, folder: Path) -> Mapping[str, Array]:
    """What a Core AI program returns on this machine, by the names of its outputs.

    Args:
        program: Of Core AI.
        inputs: By the names of its inputs.
        folder: An empty one, for its asset.
    """
    values = {name: coreai.runtime.NDArray(x.numpy()) for name, x in inputs.items()}
    asset = program.save_asset(folder / "model.aimodel")

    async def run() -> dict[str, Array]:
        async with asset.executable() as model:
            results = await model.load_function("main")(values)
            return {name: np.array(x.numpy()) for name, x in results.items()}

    return asyncio.run(run())
