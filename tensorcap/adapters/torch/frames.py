"""Where in the user's code an op is run: the nearest frame that is neither torch's nor ours."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Final, NamedTuple

import torch

import tensorcap_formats
from tensorcap.workload.metadata import redact

_TORCH: Final = os.path.join(torch.__path__[0], "")
_OURS: Final = (sys.modules[__name__.partition(".")[0]], tensorcap_formats)
_INNER: Final = (_TORCH, *(os.path.join(package.__path__[0], "") for package in _OURS))
_FUNCTORCH: Final = os.path.join(_TORCH, "_functorch", "")
TRACED: Final = "under torch.jit.trace"
TRANSFORMED: Final = "inside a function transform (vmap, grad, …)"
_OBSTACLES: Final = {  # files whose frames say it, since by the time an op is seen nothing else does
    **{_FUNCTORCH + name: TRANSFORMED for name in ("apis.py", "eager_transforms.py", "vmap.py")},
    os.path.join(_TORCH, "jit", "_trace.py"): TRACED,
}
_OF_COMPILED: Final = (
    os.path.join(_TORCH, "_inductor", ""),
    os.path.join(_FUNCTORCH, "_aot_autograd", ""),
    _FUNCTORCH + "aot_autograd.py",
)
_RUNS_GRAPHS: Final = os.path.join(_TORCH, "_dynamo", "eval_frame.py")
_GRAPH: Final = "<eval_with_key>"  # what torch.fx names the file of code that it made


class Source(NamedTuple):
    """A line of the user's code; all None where no frame is theirs."""

    file: str | None
    line: int | None
    function: str | None


class _Code(NamedTuple):
    """What is known of a code object, which is kept so that its id stays its own."""

    code: CodeType
    file: str
    is_inner: bool
    obstacle: str
    is_compiled: bool
    is_graph: bool
    runs_graphs: bool


class Frames:
    """Finds sources; remembers what it has learnt of each code object."""

    def __init__(self) -> None:
        self._codes: dict[int, _Code] = {}

    def source(self, frame: FrameType | None) -> Source | None:
        """The nearest line of the user's code, from a frame outwards; None if torch.compile made it."""
        found = self._outwards(frame)
        if found is None:
            return Source(None, None, None)
        user, code = found
        caller = user.f_back
        if code.is_compiled or (caller is not None and self._known(caller).is_compiled):
            return None
        if code.is_graph:
            while caller is not None and (known := self._known(caller)).is_inner:
                if known.runs_graphs:
                    return None
                caller = caller.f_back
        return Source(code.file, user.f_lineno, code.code.co_name)

    def obstacle(self, token: int, frame: FrameType | None) -> str | None:
        """Why an op in a frame is not what the user wrote, in the call whose frame has an id; "" if it is.

        None if no frame outwards has that id.
        """
        found = ""
        while frame is not None:
            if id(frame) == token:
                return found
            found = found or self._known(frame).obstacle
            frame = frame.f_back
        return None

    def _outwards(self, frame: FrameType | None) -> tuple[FrameType, _Code] | None:
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
                _OBSTACLES.get(file, ""),
                file.startswith(_OF_COMPILED),
                file.startswith(_GRAPH),
                file == _RUNS_GRAPHS,
            )
        return known
