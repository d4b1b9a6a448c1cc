"""A port: a model to trust, the one under test, and what both are run on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensorcap.workload.workload import Workload, load_file
from tensorcap_formats.errors import UsageError

PORTS = "PORTS"  # a dict of this name in a file has ports by name


@dataclass(frozen=True)
class Port:
    """What `tcap verify FILE.py:NAME` needs to know of a port.

    Attributes:
        reference: A workload, or a function that makes one; with `inputs` it makes the model alone.
        target: The same of the model under test.
        inputs: Gives the arguments of a side, `reference` or `target`: what each makes of the same text,
            image or sound is written here. None where the workloads have their own.
        rules: A file of rules for names that tensorcap does not know.
        mapping: A map file, where what belongs together is known.
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

    def make(self, side: Literal["reference", "target"]) -> Workload:
        """Make the workload of a side.

        Raises:
            UsageError: What was given makes none.
        """
        given = self.reference if side == "reference" else self.target
        if self.inputs is not None:
            return Workload(given(), self.inputs(side))
        made = given if isinstance(given, Workload) or not callable(given) else given()
        if not isinstance(made, Workload):
            raise UsageError(
                f"port: {side}: found a {type(made).__name__}, expected a tensorcap.Workload",
                hint="A function that makes the model alone needs inputs=.",
            )
        return made

    def allow(self, dtype: str | None, device: str | None) -> None:
        """Refuse a precision or a device that the port is not made for.

        Raises:
            UsageError: It is none of those that are listed.
        """
        for what, found, listed in (("dtype", dtype, self.dtypes), ("device", device, self.devices)):
            if found is not None and listed and found not in listed:
                raise UsageError(f"port: {what}: found {found}, expected {' or '.join(listed)}")


def port_at(path: str) -> Port | None:
    """The port at `FILE.py:NAME`: a variable, or an entry of the dict `PORTS`.

    Returns:
        None if the path is not of that form, or what it names is something else.
    """
    file, _, name = path.rpartition(":")
    if not file.endswith(".py") or not Path(file).expanduser().is_file():
        return None
    module = load_file(file)
    found = getattr(module, name, None)
    if found is None:
        known = getattr(module, PORTS, None)
        found = known.get(name) if isinstance(known, Mapping) else None
    return found if isinstance(found, Port) else None
