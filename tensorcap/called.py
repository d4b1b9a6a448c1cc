"""Capture of a model that only the code in a block has."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tensorcap.adapters import CalledRoot, adapter_named
from tensorcap.capturing import Capture, capture
from tensorcap_formats.errors import CaptureError


@dataclass
class Called:
    """What a block calls.

    Attributes:
        capture: That of the model that was found; None before.
        roots: The models that were called until now.
    """

    capture: Capture | None = None
    roots: Sequence[CalledRoot] = ()


@contextmanager
def capture_called(
    path: str | os.PathLike[str] | None,
    *,
    framework: str = "torch",
    root: str | None = None,
    **options: Any,
) -> Iterator[Called]:
    """Capture the first model that the code in a block calls, where nobody else has it.

    Args:
        path: As for `capture`.
        framework: Whose model it is: `torch`, or `max`, of which the first model is meant that a graph is
            made of.
        root: A glob for the class of the model, or one and `@N` for the N-th such model, from 0.
        options: Further arguments of `capture`.

    Returns:
        A context manager that gives what is called.

    Raises:
        CaptureError: No such model was called.
        MissingPackageError: The framework is not installed.

    Example:
        >>> import torch, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> with capture_called(folder.name + "/ref.h5") as called:
        ...     _ = torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(1, 2))
        >>> called.capture.summary.captured
        ('@root', '0')
        >>> folder.cleanup()
    """
    called = Called()
    with ExitStack() as stack:

        def take(model: Any) -> bool:
            called.capture = stack.enter_context(capture(model, path, **options))
            return True

        called.roots = stack.enter_context(adapter_named(framework).roots(root, take))
        yield called
    if called.capture is None:
        names = ", ".join(found.name for found in called.roots)
        what = f"no model {root!r}" if root else f"no {framework} model with parameters"
        raise CaptureError(
            f"{what} was called in the block" + (f", but {names}" if names else ""),
            hint="What is called in other processes is not seen.",
        )
