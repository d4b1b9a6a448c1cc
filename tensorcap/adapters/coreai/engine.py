"""Core AI's packages, of the one release whose private names are known; nothing else imports them."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

import coreai  # noqa: F401 # the framework's own name, by which its absence is reported

from tensorcap_formats.errors import UsageError, missing_package

EXPECTED: Final = "0.4.3"  # whose private functions the operation map is read by


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what the converter prints, its warnings (one of them false) and its logs."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


try:
    VERSION: Final = version("coreai-torch")
except ModuleNotFoundError:
    raise missing_package("capturing a coreai model", "coreai-torch", extra="coreai") from None
if VERSION != EXPECTED:
    raise UsageError(
        f"coreai-torch {VERSION}: expected {EXPECTED}, whose operation maps are known",
        hint=f"Install it with: pip install 'coreai-torch=={EXPECTED}'",
    )

with quiet():
    from coreai.authoring import AIModelAsset, AIProgram
    from coreai.runtime import NDArray
    from coreai_torch import TorchConverter, get_decomp_table
    from coreai_torch.debugging import debug_info
    from coreai_torch.debugging.debug_info import WalkResult
    from coreai_torch.debugging.inspector import CoreAIInspector, MissingValue
    from coreai_torch.debugging.torch_utils import (
        _extract_output_mappings_from_coreai_program as output_maps,
    )
    from coreai_torch.debugging.torch_utils import (
        _extract_source_identifiers_from_coreai_program as torch_sources,
    )

locations: Any = vars(debug_info)["_mlir"]  # has no types


def operations_by_id(program: Any) -> dict[int, list[Any]]:
    """The operations of a program by their ids, which a conversion may give to several; in program order."""
    operations: dict[int, list[Any]] = {}

    def add(operation: Any) -> Any:
        op_id = locations.get_operation_id(operation.location, "coreai")
        if op_id is not None:
            operations.setdefault(op_id.value, []).append(operation)
        return WalkResult.ADVANCE

    program._module._mlir_module.operation.walk(add)
    return operations


__all__ = [
    "VERSION",
    "AIModelAsset",
    "AIProgram",
    "CoreAIInspector",
    "MissingValue",
    "NDArray",
    "TorchConverter",
    "get_decomp_table",
    "locations",
    "operations_by_id",
    "output_maps",
    "quiet",
    "torch_sources",
]
