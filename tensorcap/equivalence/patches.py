"""Stage 4: a patch of the port's class for the first fault, and the components tested again with it.

A patch is a file `patches/NAME.py` of a person's with functions `apply_…`, which are called before the port
is built, in each process that builds it. The first run of the stage writes the skeleton of one; once somebody
has filled it in, the port is captured with all patches, and R is shown before and after.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from tensorcap.alignment import sides
from tensorcap.equivalence import captures, components, fault_localization, mapping
from tensorcap.equivalence.component_files import TENSORS
from tensorcap.equivalence.component_result import ComponentResult, read_results, stage2_content
from tensorcap.equivalence.component_tensors import write_tensors
from tensorcap.equivalence.experiment import PATCHES, Experiment
from tensorcap.equivalence.models import MODEL_SETTINGS
from tensorcap.equivalence.parallel_modules import target_modules
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.wording import counted
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tensorcap_formats.progress import Progress

FILE: Final = "results/stage4.json"
STAGE2: Final = "results/stage2_patched.json"
_TENSORS: Final = f"{TENSORS}_patched"
_SHOWN: Final = 8
_LOADED: Final = "tcap_workload_"  # what modules of files that were loaded by their path are named
_SKELETON: Final = '''"""A patch of {cls}, for {component}.

{description}

`apply_{name}_patch` is called before the port is built, in each of its processes; it may be called often, and
patches once. The port's own files stay as they are.
"""

from __future__ import annotations

from typing import Any


def apply_{name}_patch() -> None:
    """Patch the class, once."""
    from {module} import {cls}

    if getattr({cls}, "_patched_by_{name}", False):
        return
    original_init, original_forward = {cls}.__init__, {cls}.forward

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        # Keep corrected values on self under new names: a buffer that is None cannot be assigned.

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Compute here what the source does, with its casts: none more, none less.
        return original_forward(self, *args, **kwargs)

    {cls}.__init__, {cls}.forward = init, forward
    {cls}._patched_by_{name} = True
'''


def patch_port(experiment: Experiment, progress: Progress) -> StageResult:
    """Write the skeleton of a patch, or test the components again with the patches that there are."""
    if not experiment.patches:
        return _write_skeleton(experiment)
    progress.stage("capturing the target with its patches")
    captures.capture_target(experiment, captures.PATCHED, is_patched=True)
    write_tensors(experiment, captures.PATCHED, _TENSORS, progress)
    progress.stage("testing the components of the patched port")
    after = components.run_tests(experiment, _TENSORS)
    before = _before(experiment)
    experiment.write_json(STAGE2, stage2_content(after))
    experiment.write_json(FILE, _content(experiment, before, after))
    failed = [one for one in after if not one.passed]
    words = [
        f"With {counted(len(experiment.patches), 'file')} of patches {len(after) - len(failed)} of "
        f"{counted(len(after), 'component')} pass, {sum(one.passed for one in before)} did before."
    ]
    words += _side_by_side(before, after)
    gate = "failed" if failed or not after else "passed"
    return StageResult(gate, tuple(words), (FILE, STAGE2, captures.PATCHED))


def _write_skeleton(experiment: Experiment) -> StageResult:
    """Write the skeleton of a patch of the class that the first fault is in."""
    content = experiment.read_json(fault_localization.FILE, stage="localize")
    fault = content.get("primary_fault")
    if fault is None:
        return StageResult("passed", ("No component failed: there is nothing to patch.",), ())
    module, cls = _target_class(experiment, fault["component"])
    name = re.sub(r"\W+", "_", fault["component"]).strip("_")
    text = _SKELETON.format(
        cls=cls, module=module, name=name, component=fault["component"], description=fault["description"]
    )
    file = experiment.write_editable(f"{PATCHES}/{name}.py", text)
    words = f"{file}: the skeleton of a patch of {cls}, which does nothing yet."
    then = f"Fill in {experiment.folder / file}, then tcap equivalence patch {experiment.folder}."
    return StageResult("failed", (words,), (file,), (then,))


def _target_class(experiment: Experiment, component: str) -> tuple[str, str]:
    """The module and the name of the port's class that a component is ported as."""
    with (
        open_archive(experiment.folder / captures.SOURCE) as original,
        open_archive(experiment.folder / captures.TARGET) as tested,
    ):
        _, seen = sides(original, tested, experiment.folder / mapping.FILE)
        module = target_modules(seen, tested).get(component)
    if module is None or not module.class_name:
        raise UsageError(f"{component}: the port's class is not known", hint="Write the patch by hand.")
    package, _, name = module.class_name.rpartition(".")
    return package.removeprefix(_LOADED), name


def _before(experiment: Experiment) -> tuple[ComponentResult, ...]:
    content = experiment.read_json(components.FILE, stage="components")
    return read_results(content, str(experiment.folder / components.FILE))


def _content(
    experiment: Experiment, before: Sequence[ComponentResult], after: Sequence[ComponentResult]
) -> dict[str, Any]:
    known = {one.component: one for one in before}
    results = [
        {
            "component": one.component,
            "r_ratio_before": known[one.component].ratio if one.component in known else None,
            "r_ratio_after": one.ratio,
            "passed_before": known[one.component].passed if one.component in known else None,
            "passed_after": one.passed,
        }
        for one in after
    ]
    names = [str(path.relative_to(experiment.folder)) for path in experiment.patches]
    return {"results": results, "patches": names, "passed": all(one.passed for one in after)}


def _side_by_side(before: Sequence[ComponentResult], after: Sequence[ComponentResult]) -> list[str]:
    """What failed before or fails now, as lines."""
    known = {one.component: one for one in before}
    lines = []
    for one in after:
        was = known.get(one.component)
        if not one.passed or (was is not None and not was.passed):
            old = "no test" if was is None else _ratio(was)
            state = "passes" if one.passed else "fails"
            lines.append(f"{one.component}: {old} before, {_ratio(one)} after: {state}.")
    return [*lines[:_SHOWN], *([f"And {len(lines) - _SHOWN} more."] if len(lines) > _SHOWN else [])]


def _ratio(result: ComponentResult) -> str:
    return f"R {result.ratio:.4g}" if result.ratio is not None else "no R"


STAGE: Final = Stage(
    4,
    "patch",
    "a patch of the port, and R before and after",
    patch_port,
    (FILE, STAGE2, f"{PATCHES}/*.py", captures.PATCHED),
    needs=(components.STAGE, fault_localization.STAGE, captures.STAGE, mapping.STAGE),
    settings=(*MODEL_SETTINGS, "run.tp", "run.dtype", "run.reference_dtype", "limits.tau_r"),
    sources=lambda experiment: experiment.patches,
    edited_files=(f"{PATCHES}/*.py",),
    is_optional=True,
    when_failed="Edit the patch, and run tcap equivalence patch again.",
)
