"""A compiled program in a folder: what it says of itself, and its operations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tensorcap.wording import counted, one_line
from tensorcap_cli.text.output import DASH, print_json, print_table, size_text

if TYPE_CHECKING:
    from tensorcap.adapters import ProgramOperation
    from tensorcap_formats.foreign import AssetInfo

_HEADERS: Final = ("id", "operation", "result", "holds", "made of", "modules", "code")
_LOST: Final = (
    "none: converted in release mode, so that the torch nodes, modules and lines of the operations "
    "are not known"
)


def show_asset(path: str, *, as_json: bool) -> None:
    """Print what an asset says of itself; and of its operations how many there are, if they can be read."""
    from tensorcap_formats.foreign import read_asset

    info = read_asset(path)
    operations, reason = _operations(path)
    if as_json:
        print_json({**info.to_json(), "operations": None if reason else len(operations), "note": reason})
        return
    click.echo(_headline(info))
    for name, text in (
        ("producer", info.producer),
        ("version", info.version),
        ("created", info.created),
        ("hash", _hash_text(info)),
        ("operations", reason or _operations_text(operations)),
        ("locations", "" if reason else _locations_text(operations)),
    ):
        if text:
            click.echo(f"  {name:<14}{one_line(text)}")


def list_asset(path: str, *, as_json: bool) -> None:
    """Print the operations of an asset.

    Raises:
        MissingPackageError: The packages that read them are not installed.
    """
    from tensorcap_formats.errors import MissingPackageError
    from tensorcap_formats.foreign import read_asset

    info = read_asset(path)
    operations, reason = _operations(path)
    if reason:
        raise MissingPackageError(f"{path}: operations {reason}")
    if as_json:
        print_json({**info.to_json(), "operations": [_as_json(operation) for operation in operations]})
        return
    click.echo(_headline(info))
    print_table(_HEADERS, [_cells(operation) for operation in operations], left=(1, 2, 3, 4, 5, 6))
    click.echo(f"locations: {_locations_text(operations)}")


def _operations(path: str) -> tuple[list[ProgramOperation], str]:
    """The operations; none and the reason if the packages that read them are not installed."""
    from tensorcap.adapters import adapter_named
    from tensorcap_formats.errors import MissingPackageError

    try:
        return adapter_named("coreai").program_operations(Path(path)), ""
    except MissingPackageError as error:
        return [], f"not readable without Core AI's packages. {error.hint}"


def _headline(info: AssetInfo) -> str:
    return f"{info.path}: Core AI asset, {size_text(info.nbytes)}"


def _hash_text(info: AssetInfo) -> str:
    if info.is_intact is None:
        return "none"
    check = "that of its program" if info.is_intact else "NOT that of its program, which was changed since"
    return f"sha256 {info.digest}, {check}"


def _operations_text(operations: list[ProgramOperation]) -> str:
    values = sum(len(operation.holds) for operation in operations)
    return f"{len(operations)}, which hold {counted(values, 'output')} of nodes of the torch graph"


def _locations_text(operations: list[ProgramOperation]) -> str:
    located = sum(bool(operation.file) for operation in operations)
    return f"of {located} of {counted(len(operations), 'operation')}" if located else _LOST


def _cells(operation: ProgramOperation) -> tuple[str, ...]:
    line = f":{operation.line}" if operation.line else ""
    code = f"{os.path.basename(operation.file)}{line}" if operation.file else DASH
    lists = (operation.types, operation.holds, operation.made_of)
    texts = [", ".join(names) or DASH for names in lists]
    modules = ".".join(operation.instances) or DASH
    return (str(operation.op_id), operation.op, *map(one_line, texts), one_line(modules), one_line(code))


def _as_json(operation: ProgramOperation) -> dict[str, Any]:
    return {
        "op_id": operation.op_id,
        "op": operation.op,
        "types": operation.types,
        "holds": operation.holds,
        "made_of": operation.made_of,
        "modules": operation.instances,
        "file": operation.file,
        "line": operation.line,
    }
