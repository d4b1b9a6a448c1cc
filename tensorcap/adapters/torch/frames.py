"""The line of the user's code that runs an op: the nearest frame that is neither torch's nor ours."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Final, NamedTuple

import torch

import tensorcap_formats
from tensorcap.workload import redact

_TORCH: Final = os.path.join(torch.__path__[0], "")
_OURS: Final = (sys.modules[__name__.partition(".")[0]], tensorcap_formats)
_INNER: Final = (_TORCH, *(os.path.join(package.__path__[0], "") for package in _OURS))
_FUNCTORCH: Final = os.path.join(_TORCH, "_functorch", "")
TRACED: Final = "under torch.jit.trace"
TRANSFORMED: Final = "inside a function transform (vmap, grad, …)"
_GAP_FILES: Final = {  # by file of a frame: when an op is seen, nothing else shows it
    **{_FUNCTORCH + name: TRANSFORMED for name in ("apis.py", "eager_transforms.py", "vmap.py")},
    os.path.join(_TORCH, "jit", "_trace.py"): TRACED,
}
_OF_COMPILED: Final = (
    os.path.join(_TORCH, "_inductor", ""),
    os.path.join(_FUNCTORCH, "_aot_autograd", ""),
    _FUNCTORCH + "aot_autograd.py",
)
_RUNS_GRAPHS: Final = os.path.join(_TORCH, "_dynamo", "eval_frame.py")
_GRAPH: Final = "<eval_with_key>"  # the file name that torch.fx gives to code that it generates


class Source(NamedTuple):
    """A line of the user's code; all None if no frame is the user's."""

    file: str | None
    line: int | None
    function: str | None


class _Code(NamedTuple):
    """The properties of a code object, which is kept so that its id stays its own."""

    code: CodeType
    file: str
    is_inner: bool
    gap: str
    is_compiled: bool
    is_graph: bool
    runs_graphs: bool


class Frames:
    """Finds sources; keeps the properties of each code object that it has seen."""

    def __init__(self) -> None:
        self._codes: dict[int, _Code] = {}

    def source(self, frame: FrameType | None) -> Source | None:
        """Find the nearest line of the user's code, from a frame outwards; None if torch.compile made it."""
        nearest = self._nearest_user_frame(frame)
        if nearest is None:
            return Source(None, None, None)
        user, code = nearest
        caller = user.f_back
        if code.is_compiled or (caller is not None and self._known(caller).is_compiled):
            return None
        if code.is_graph:
            while caller is not None and (known := self._known(caller)).is_inner:
                if known.runs_graphs:
                    return None
                caller = caller.f_back
        return Source(code.file, user.f_lineno, code.code.co_name)

    def gap(self, token: int, frame: FrameType | None) -> str | None:
        """Find why an op in a frame is not as the user wrote it, within a call of a module.

        Args:
            token: The id of the frame of the module's call.
            frame: The frame of the op.

        Returns:
            The reason, empty if there is none; None if no frame outwards has that id.
        """
        reason = ""
        while frame is not None:
            if id(frame) == token:
                return reason
            reason = reason or self._known(frame).gap
            frame = frame.f_back
        return None

    def _nearest_user_frame(self, frame: FrameType | None) -> tuple[FrameType, _Code] | None:
        while frame is not None:
            code = self._known(frame)
            if code.is_compiled or not code.is_inner:
                return frame, code
            frame = frame.f_back
        return None

    def _known(self, frame: FrameType) -> _Code:
        code = frame.f_code
        known = self._codes.get(id(code))
        if known is None:
            file = code.co_filename
            known = self._codes[id(code)] = _Code(
                code,
                redact(file),
                file.startswith(_INNER),
                _GAP_FILES.get(file, ""),
                file.startswith(_OF_COMPILED),
                file.startswith(_GRAPH),
                file == _RUNS_GRAPHS,
            )
        return known
