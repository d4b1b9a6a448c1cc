"""A port, declared in a file: the trusted model, the model under test, and the inputs of both."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensorcap.workload.workload import Workload, load_file
from tensorcap_formats.errors import UsageError

PORTS = "PORTS"  # name of the dict of a file that has its ports by name
PortSide = Literal["reference", "target"]


@dataclass(frozen=True)
class Port:
    """A port for `tcap verify FILE.py:NAME`.

    Attributes:
        reference: A workload, or a function that makes one; with `inputs`, a function that makes the model.
        target: The same for the model under test. Functions are given `dtype` and `num_hidden_layers` if they
            have such parameters.
        inputs: Returns the arguments of a side, `reference` or `target`, each made of the same text, image
            or sound. None if the workloads have inputs.
        rules: A file of rules for names that tensorcap does not know.
        mapping: A map file, if it is known which tensors belong together.
        dtypes: Precisions that the target may be run in; any if empty.
        devices: Devices that it may be run on; any if empty.
    """

    reference: Any
    target: Any
    inputs: Callable[[str], Mapping[str, Any] | tuple[Any, ...]] | None = None
    rules: str | os.PathLike[str] | None = None
    mapping: str | os.PathLike[str] | None = None
    dtypes: Sequence[str] = ()
    devices: Sequence[str] = ()

    def make(self, side: PortSide, **options: Any) -> Workload:
        """Make the workload of a side.

        Args:
            side: Which.
            options: Arguments of its function, for some of `parameters`.

        Raises:
            UsageError: The port has none for it.
        """
        source = self._source(side)
        if self.inputs is not None:
            return Workload(source(**options), self.inputs(side))
        workload = source(**options) if _is_function(source) else source
        if not isinstance(workload, Workload):
            raise UsageError(
                f"port: {side}: found a {type(workload).__name__}, expected a tensorcap.Workload",
                hint="A function that makes the model alone needs inputs=.",
            )
        return workload

    def parameters(self, side: PortSide) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function that makes a side; none if it is a workload."""
        source = self._source(side)
        return inspect.signature(source).parameters if _is_function(source) else {}

    def _source(self, side: PortSide) -> Any:
        return self.reference if side == "reference" else self.target

    def allow(self, dtype: str | None, device: str | None) -> None:
        """Refuse a precision or a device that the port is not made for.

        Raises:
            UsageError: It is none of those that are listed.
        """
        for what, name, listed in (("dtype", dtype, self.dtypes), ("device", device, self.devices)):
            if name is not None and listed and name not in listed:
                raise UsageError(f"port: {what}: found {name}, expected {' or '.join(listed)}")


def _is_function(source: Any) -> bool:
    return callable(source) and not isinstance(source, Workload)


def load_port(path: str) -> Port | None:
    """Load the port at `FILE.py:NAME`: a variable, or an entry of the dict `PORTS`.

    Returns:
        None if the path is not of that form, or what it names is something else.
    """
    file, _, name = path.rpartition(":")
    if not file.endswith(".py") or not Path(file).expanduser().is_file():
        return None
    module = load_file(file)
    port = getattr(module, name, None)
    if port is None:
        ports = getattr(module, PORTS, None)
        port = ports.get(name) if isinstance(ports, Mapping) else None
    return port if isinstance(port, Port) else None
