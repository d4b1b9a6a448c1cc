"""For test suites: an archived run of a reference is a regression test in one line.

    def test_port_still_matches():
        tensorcap.testing.assert_matches("ref.h5", make_port(), rtol=1e-3)

Nothing here needs pytest, and no framework is loaded before a model is given.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tensorcap.comparison import Comparison, Pair, compare, worst
from tensorcap.metrics import Difference
from tensorcap.wording import some
from tensorcap_formats.archive import Archive
from tensorcap_formats.open import open_archive

if TYPE_CHECKING:
    from tensorcap.workload import Workload

_WORST: Final = 3  # pairs that a failure names: more are not read
_OPTIONS: Final = {"mapping": "--map"}  # of `tcap compare`, by arguments of `compare` of another name


def assert_matches(
    reference: str | os.PathLike[str],
    target: Any,
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    only: Collection[str] = (),
    exclude: Collection[str] = (),
    keep: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Comparison:
    """Assert that a target computes what an archived reference run computed.

    Args:
        reference: Archive of the trusted run, of one process.
        target: Archive of the run under test; or a `Workload`, a model, or a function without arguments that
            returns one of these, which is run and captured.
        inputs: What a model is run on; those that the reference holds if None.
        rtol: As for `tensorcap.compare`.
        atol: As for `tensorcap.compare`.
        only: Globs; compare only keys that fit one of them.
        exclude: Globs; leave out keys that fit one of them.
        keep: Where to put the archive of a target that was run; if None it is kept, in a temporary folder,
            only when the assertion fails.
        **options: Further ones of `tensorcap.compare`, such as `thresholds` or `baseline`.

    Returns:
        The comparison, if it is green.

    Raises:
        AssertionError: It is not; the text names the first divergence, the counts and how to look further.
            Of a run of several ranks that joined each other, all of them raise it.
        TensorcapError: The archives cannot be read or the target cannot be run.
    """
    compared_by = {"rtol": rtol, "atol": atol, "only": only, "exclude": exclude, **options}
    if isinstance(target, str | os.PathLike):
        return _require_green(compare(reference, target, **compared_by), compared_by)
    folder = Path(tempfile.mkdtemp(prefix="tensorcap-"))
    path = Path(keep) if keep is not None else folder / "target.h5"
    is_kept = keep is not None
    try:
        with open_archive(reference) as trusted:
            captured = _capture(trusted, target, inputs, path)
            comparison = compare(trusted, captured.path, **compared_by)
            captured.wait()
        is_kept = is_kept or comparison.exit_status != 0
        return _require_green(comparison, compared_by)
    finally:
        if not is_kept or keep is not None:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # what is kept lies in the first rank's folder
            folder.rmdir()


@dataclass(frozen=True, slots=True)
class _Captured:
    """The archive of a target that was run.

    Attributes:
        path: It; of a run of several ranks that joined each other, the pattern that names all of theirs.
        wait: Waits until all ranks are done with it.
    """

    path: Path
    wait: Callable[[], object]


def _capture(reference: Archive, target: Any, inputs: Any, path: Path) -> _Captured:
    """Run a target under capture, at the sites and slots that the reference has.

    Ranks that joined each other write beside each other, where the first of them does, and wait until all
    have written.
    """
    from tensorcap.adapters import adapter_for
    from tensorcap.session import capture_workload
    from tensorcap_formats.ranks import rank_path, rank_pattern
    from tensorcap_formats.run_info import ScopeInfo

    scope = reference.info.scope or ScopeInfo()
    made = _make_workload(reference, target, inputs)
    adapter = adapter_for(made.model)
    workload = adapter.adopt(made, {})
    path = Path(adapter.gather_texts(str(path))[0])
    capture = capture_workload(workload, path, only=scope.include, exclude=scope.exclude, inputs=scope.inputs)
    own = capture.path or path
    ranks = adapter.gather_texts(str(own))
    shared = rank_pattern(rank_path(path, 0)) if len(ranks) > 1 else own
    return _Captured(shared, partial(adapter.gather_texts, ""))


def _make_workload(reference: Archive, target: Any, inputs: Any) -> Workload:
    """Make the workload of a target: a model is run on the reference's inputs, a function is called."""
    from tensorcap.adapters import adapter_for
    from tensorcap.workload import Workload, archived_inputs
    from tensorcap_formats.errors import UsageError

    if not isinstance(target, Workload):
        try:
            adapter_for(target)
        except UsageError:
            if not callable(target):
                raise
            return _make_workload(reference, target(), inputs)
        target = Workload(target, {} if inputs is None else inputs)
        stored = archived_inputs(reference) if inputs is None else None
        prepared: Workload = adapter_for(target.model).prepare(target, inputs=stored)
        return prepared
    return target if inputs is None else replace(target, inputs=inputs)


def _require_green(comparison: Comparison, compared_by: Mapping[str, Any]) -> Comparison:
    if comparison.exit_status != 0:
        raise AssertionError(failure_text(comparison, compared_by))
    return comparison


def failure_text(comparison: Comparison, compared_by: Mapping[str, Any]) -> str:
    """Say why a comparison is not green, in few lines.

    Args:
        comparison: One that is not.
        compared_by: The options that it was made with, for the command to look further.
    """
    lines = [f"{comparison.target.path} does not match {comparison.reference.path}", *comparison.warnings]
    first = comparison.divergence
    if first is not None:
        lines.append(f"first divergence: {first.pair.key} ({first.pair.status})")
        if first.is_run_input:
            lines.append(f"  {first.explanation}")
        else:
            lines.append(f"  module {first.module}" + (f" ({first.class_name})" if first.class_name else ""))
        lines += [f"  {line}" for line in _details(first.pair)]
    if comparison.absent:
        keys = [f"{pair.key} ({pair.status})" for pair in comparison.absent]
        lines.append(f"missing: {some(keys)}")
    for pair in worst(comparison.pairs, _WORST):
        if first is None or pair.key != first.pair.key:
            lines.append(f"worst: {pair.key} ({pair.status})")
            lines += [f"  {line}" for line in _details(pair)[:2]]
    counts = ", ".join(f"{count} {status}" for status, count in comparison.counts.items())
    lines.append(
        f"{comparison.compared} of {comparison.records} reference tensors compared: {counts or 'none'}"
    )
    if not comparison.compared:
        lines.append("nothing was compared")
    lines.append(f"look further: {_command(comparison, compared_by)}")
    return "\n".join(lines)


def _details(pair: Pair) -> list[str]:
    lines = [pair.reason] if pair.reason else []
    lines += [finding.text for finding in pair.findings]
    d = pair.difference
    return lines + ([_difference(d)] if d is not None else [])


def _difference(d: Difference) -> str:
    if d.mask_mismatches and d.mask_index is not None:
        return f"not finite alike in {d.mask_mismatches} elements, first at {list(d.mask_index)}"
    if d.max_abs is None or d.max_abs_index is None:
        return "no error was measured"
    relative = math.nan if d.relative_frobenius is None else d.relative_frobenius
    is_elsewhere = d.mismatch_index not in (None, d.max_abs_index)
    outside = (
        f", the first element outside the tolerance at {list(d.mismatch_index or ())}" if is_elsewhere else ""
    )
    return (
        f"max abs {d.max_abs:.4g} at {list(d.max_abs_index)} (reference {d.max_abs_reference:.7g}, target "
        f"{d.max_abs_target:.7g}), relative Frobenius {relative:.3g}, {d.unequal} of {d.elements} unequal"
        f"{outside}"
    )


def _command(comparison: Comparison, compared_by: Mapping[str, Any]) -> str:
    """The command that makes the same comparison, as far as its options are texts, files and numbers."""
    words = ["tcap", "compare", str(comparison.reference.path), str(comparison.target.path)]
    for name, value in compared_by.items():
        option = _OPTIONS.get(name) or f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [option] * value
        elif isinstance(value, (str, os.PathLike, int, float)):
            words += [option, str(value)]
        elif isinstance(value, Collection):
            words += [word for item in value for word in (option, str(item))]
    return shlex.join(words)
