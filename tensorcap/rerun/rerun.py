"""Call a module of the reference again on what the target's was given, to try what a mistake would make."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorcap.adapters.edits import Rerun
from tensorcap.adapters.protocol import adapter_for
from tensorcap.recording.substitution import Substitution
from tensorcap_formats.archive import Archive

if TYPE_CHECKING:
    from tensorcap.workload.workload import Workload


def rerun_of(
    workload: Workload, run: Archive, target: Archive, module: str, key: str, *, seed: int | None = None
) -> Rerun | None:
    """Run the reference's workload until a call of a module, which can then be made again.

    Args:
        workload: The reference's model and inputs.
        run: What that model made of the target's values: an archive of a replay.
        target: The target under the reference's keys.
        module: The module.
        key: Key text of a tensor that its code makes.
        seed: Of the random generators before the run; as they are if None.

    Returns:
        The call; None if it cannot be made again, such as one of a compiled module.
    """
    slots = run.info.injected.slots if run.info.injected else ()
    replaced = {(s.site, s.slot) for s in slots if s.status == "injected"}
    keys = {r.key.text for r in target.records if (r.key.site, r.key.slot) in replaced}
    if not keys or key not in run:
        return None
    adapter = adapter_for(workload.model)
    if seed is not None:
        adapter.seed(seed)
    try:
        return adapter.rerun(workload, Substitution(target, keys=keys), module, run.get(key).key)
    except Exception:  # a value that does not fit, or whatever a module that is no plain Python runs into
        return None
