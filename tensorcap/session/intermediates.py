"""A reference run of an exported program, for the debugger of the framework that it is converted to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tensorcap.adapters import adapter_for, export_graph
from tensorcap.session.capture_session import capture_workload
from tensorcap_formats.foreign import refuse_intermediates
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import build_beside


def save_intermediates(
    program: Any,
    inputs: Any,
    out: str | os.PathLike[str],
    *,
    coreai_program: Any = None,
    archive: str | os.PathLike[str] | None = None,
) -> Path:
    """Run an exported program, and save the value of each node for Apple's Core AI Debugger.

    The folder is one that `coreai_torch.debugging.torch_utils.load_intermediates` reads. It has what Apple's
    own writer leaves out: each tensor of an operator that returns several, operators such as `topk` and
    `select_scatter`, views, outputs that are views, and bfloat16 by its name. The archive has the same values
    once each, with the module, its call and the source line of every node; `tcap export` makes the folder of
    it.

    Args:
        program: A `torch.export.ExportedProgram`, as it is given to the converter.
        inputs: Its positional arguments in a tuple or list, or arguments by name.
        out: The folder to write, `NAME.aimodelintermediates`, which is not there yet.
        coreai_program: The Core AI program that it was converted to, whose operators are mapped to the nodes.
        archive: Where to put the run as an archive too; None for none.

    Returns:
        The folder.

    Raises:
        UsageError: `program` is no exported program, or `coreai_program` no Core AI program; inputs do not
            fit; the folder has another suffix.
        MissingPackageError: A Core AI program is given, and the extra `coreai` is not installed.
        WriteError: The folder is there already, or the disk is full.
    """
    folder = Path(out)
    refuse_intermediates(folder)
    workload = adapter_for(program).program_workload(program, inputs)
    mappings = {}
    if coreai_program is not None:
        mappings = {"mappings": adapter_for(coreai_program).program_mappings(coreai_program)}
    with build_beside(folder) as building:
        path = building / "run.h5" if archive is None else Path(archive)
        if archive is None:
            building.mkdir()
        capture_workload(workload, path, level="export", params=True, run=mappings)
        with open_archive(path) as run:
            export_graph(run, folder)
    return folder
