"""Find the guilty module by running the target: results grafted up to a cut, the final output watched.

Everything that the target computes up to a cut is replaced by what the reference computed there. If the final
output is then as good as it can be, the mistake lies before the cut, else behind it; about log2(n) runs name
the result at which it is made.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tensorcap.adapters.protocol import adapter_for
from tensorcap.alignment.aligned import NO_MAPPING, MappingSource, aligned_if_needed, fitting
from tensorcap.alignment.mapping import Alignment
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.divergence import Divergence
from tensorcap.comparison.pair import Pair
from tensorcap.comparison.pipeline import Source, compare, opened
from tensorcap.comparison.policy import POLICY
from tensorcap.localization.bisection_state import Run, State
from tensorcap.recording.substitution import Substitution
from tensorcap.rerun.injection import reversed_by
from tensorcap.runs.ops import ops_of
from tensorcap.runs.record_kinds import is_inner, is_result
from tensorcap.runs.views import PartialArchive
from tensorcap.session.capture_session import capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError, abbreviate
from tensorcap_formats.keys import ROOT_SITE, Key, module_of
from tensorcap_formats.open import open_archive
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    from tensorcap.workload.workload import Workload

Tell = Callable[[int, str], None]
Blame = Literal["module", "caller"]
Level = Literal["module", "op"]
MakesArchive = Callable[[Path, tuple[str, ...]], Path]

_AS_GOOD: Final = 1.5  # times the error that is left with everything grafted
_SHOWN: Final = 3  # ops
_SKIP: Final = 125  # exit status of a check that cannot tell, as for `git bisect run`
_ALL, _NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class LiveBisection:
    """What the runs found.

    Attributes:
        cuts: Count of results that could be grafted.
        key: Key text, in the target's names, of the result at which the mistake is made; "" if there is none.
        module: The guilty module, in the reference's names; "" if none was found.
        blame: Whether the module's own result is wrong for what it was given, or what it was given by the
            code around it, which is then `module`.
        limit: Error of the final output up to which a run is good, with everything grafted.
        runs: All runs that led there, in order.
        divergence: The first difference within the module, with everything before it grafted; None where the
            archives have nothing of it in common.
        ops: The first ops of the module that differ, or that one side alone has, in order; at most three, and
            none unless ops were asked for.
    """

    cuts: int
    key: str
    module: str
    blame: Blame
    limit: float
    runs: tuple[Run, ...]
    divergence: Divergence | None
    ops: tuple[Pair, ...] = ()

    @property
    def exit_status(self) -> int:
        """0 if no module was found guilty, else 1 (BIS-13)."""
        return 1 if self.key else 0


def bisect_live(
    reference: Source,
    workload: Workload,
    *,
    mapping: MappingSource | None = None,
    limit: float | None = None,
    check: str | None = None,
    level: Level = "module",
    reference_ops: MakesArchive | None = None,
    state: str | os.PathLike[str] | None = None,
    seed: int | None = None,
    tell: Tell | None = None,
) -> LiveBisection:
    """Find at which result of a target its mistake is made, by about log2(n) runs.

    Args:
        reference: The trusted archive, open or a path.
        workload: The target and its inputs.
        mapping: As for `compare`; the target's first run is what it is resolved against.
        limit: Relative error of the final output that is good; by default 1.5 times that with everything
            grafted, and at least what rounding makes of what comes behind a cut.
        check: A command that judges in the place of the error: exit status 0 is good, 1 to 124, 126 and 127
            are bad, as for `git bisect run`. `TCAP_RUN` in its environment is the archive of a run, which
            holds what the model was given and gave.
        level: `op` to go on to the op within the module.
        reference_ops: Makes an archive of the reference's ops in some sites at a path, and returns it, where
            the reference has none.
        state: A file that keeps what runs came to, so that an interrupted search goes on.
        seed: Of the random generators before each run; as they are if None.
        tell: Told of each run: its number, and the cut.

    Raises:
        UsageError: Nothing can be grafted; the reference's final output has no counterpart; a check cannot
            tell; the state is of another search.
        CaptureError: A run fails.
    """
    with ExitStack() as stack:
        trusted = stack.enter_context(opened(reference))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-")))
        search = _Search(trusted, workload, folder, limit=limit, check=check, seed=seed, tell=tell)
        stack.callback(search.close)
        search.begin(mapping, state)
        return search.run(level, reference_ops)


class _Search:
    """One search under way."""

    def __init__(
        self,
        reference: Archive,
        workload: Workload,
        folder: Path,
        *,
        limit: float | None,
        check: str | None,
        seed: int | None,
        tell: Tell | None,
    ) -> None:
        self._reference = reference
        self._workload = workload
        self._folder = folder
        self._given = limit
        self._check = check
        self._seed = seed
        self._tell = tell
        self._runs: list[Run] = []
        self._files = ExitStack()
        self._mapping: Alignment | str = NO_MAPPING
        self._full = 0.0  # error with everything grafted

    def close(self) -> None:
        """Close what was opened."""
        self._files.close()

    def begin(self, mapping: MappingSource | None, state: str | os.PathLike[str] | None) -> None:
        """Run the target as it is, and find what of it can be grafted."""
        free = self._files.enter_context(open_archive(self._capture("free.h5", -1, injectable=("output",))))
        source: Archive = self._reference
        aligned = aligned_if_needed(self._reference, free, mapping)
        if aligned is not None:
            self._mapping = aligned.alignment
            source = reversed_by(aligned, self._reference, free)
        self._source = source
        self._precision = POLICY.precision_of_runs(self._reference.info, free.info, None)
        there = {record.key.text for record in source.records}
        self._results = [r for r in free.records if r.key.text in there and _is_graft(r)]
        if not self._results:
            raise UsageError(
                f"{self._reference.path}: has no result of a module that the target has",
                hint="tcap align tells what belongs together.",
            )
        self._blocks = [_block(record) for record in self._results]
        about = {
            "reference": self._reference.root,
            "results": [record.key.text for record in self._results],
            "check": self._check,
            "limit": self._given,
        }
        self._state = State(None if state is None else Path(state), about)
        self._state.load()

    def run(self, level: Level, reference_ops: MakesArchive | None) -> LiveBisection:
        """Search for the first cut that makes the final output good."""
        low, high = -1, len(self._results) - 1
        full = self._at(high, _ALL)
        self._full = full.error or 0.0
        limit = self._limit(high)
        if not full.is_good:
            what = self._results[high].key.text
            return LiveBisection(high + 1, what, ROOT_SITE, "caller", limit, tuple(self._runs), None)
        if self._judged(_NONE, self._folder / "free.h5", -1).is_good:
            return LiveBisection(high + 1, "", "", "module", limit, tuple(self._runs), None)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._at(middle).is_good else (middle, high)
        guilty = self._results[high].key
        found = self._within(guilty, high, level, reference_ops)
        names = {source: p.key for p in found.pairs if p.target for source in _sources(p)}
        site = Key.parse(names.get(guilty.text, guilty.text)).site
        module = found.divergence.module if found.divergence else site
        blame: Blame = "module" if module == site else "caller"
        ops = [p for p in found.pairs if not p.is_green and p.status != "excluded" and _is_op_of(p, module)]
        return LiveBisection(
            len(self._results),
            guilty.text,
            module,
            blame,
            limit,
            tuple(self._runs),
            found.divergence,
            tuple(ops[:_SHOWN]),
        )

    def _at(self, last: int, name: str = "") -> Run:
        """The run with all results grafted up to one."""
        cut = name or self._results[last].key.text
        known = self._state.found.get(cut)
        if known is None:
            return self._judged(cut, self._capture("cut.h5", last, only=(ROOT_SITE,)), last)
        self._runs.append(known)
        return known

    def _judged(self, cut: str, path: Path, last: int) -> Run:
        if self._check is not None:
            run = Run(cut, None, _passes(self._check, path))
        else:
            error = self._final(path)
            run = Run(cut, error, error <= self._limit(last))
        self._runs.append(run)
        self._state.add(run)
        return run

    def _limit(self, last: int) -> float:
        """Error of the final output that is good with all results grafted up to one (BIS-11)."""
        if self._given is not None:
            return self._given
        floor = 0.0
        if self._precision is not None and self._precision.is_wide:
            floor = POLICY.in_proportion(POLICY.wide_total, self._precision).green
        elif self._precision is not None:
            behind = len({block for block in self._blocks[last + 1 :] if block})
            floor = POLICY.envelope_at(behind, self._precision)
        return max(_AS_GOOD * self._full, floor)

    def _final(self, path: Path) -> float:
        """Relative error of the final output of a run."""
        found = self._compared(self._reference, path, only=f"*{ROOT_SITE}/output*")
        measured = [
            (pair.reference.key.step, pair)
            for pair in found.pairs
            if pair.is_compared and pair.reference and pair.reference.dtype.kind == "float"
        ]
        if not measured:
            raise UsageError(
                f"{self._reference.path}: its final output has no counterpart in the target",
                hint="Judge runs by --check, or say in a map what belongs to @root.",
            )
        step = max(step for step, _ in measured)
        difference = next(pair.difference for number, pair in measured if number == step)
        if difference is None:
            return 0.0
        error = difference.relative_frobenius
        return math.inf if difference.mask_mismatches or error is None else error

    def _within(self, guilty: Key, at: int, level: Level, reference_ops: MakesArchive | None) -> Comparison:
        """The run with everything before a result grafted, compared with the reference."""
        options: dict[str, Any] = {}
        trusted: Source = self._reference
        if level == "op":
            around = guilty.site.rpartition(".")[0] or ROOT_SITE
            options = {"level": "op", "ops_in": (guilty.site, around)}
            if not ops_of(self._reference):
                if reference_ops is None:
                    raise UsageError(
                        f"{self._reference.path}: has no ops, expected those of {guilty.site}",
                        hint="Capture it with --level op, or so that its run can be repeated.",
                    )
                trusted = reference_ops(self._folder / "reference.h5", (guilty.site, around))
        path = self._capture("within.h5", at - 1, **options)
        return self._compared(trusted, path)

    def _compared(self, reference: Source, path: Path, **options: Any) -> Comparison:
        """A run compared with the reference, of which it may hold a part only."""
        with opened(reference) as trusted, open_archive(path) as run:
            mapping = self._mapping
            if isinstance(mapping, Alignment):
                mapping = fitting(mapping, trusted, run)
            return compare(trusted, run, mapping=mapping, **options)

    def _capture(self, name: str, last: int, **options: Any) -> Path:
        """Run the target, with all results grafted up to one; -1 grafts nothing."""
        path = self._folder / name
        if self._tell is not None:
            what = "as it is" if last < 0 else f"grafted up to {self._results[last].key.text}"
            self._tell(len(self._runs) + 1, what)
        if last >= 0:
            part = PartialArchive(self._source, [self._source.get(r.key) for r in self._results[: last + 1]])
            options["substitution"] = Substitution(part, outputs=("*/output*",))
        if self._seed is not None:
            adapter_for(self._workload.model).seed(self._seed)
        capture_workload(self._workload, path, **options)
        return path


def _is_graft(record: Record) -> bool:
    return is_result(record.key) and record.key.site != ROOT_SITE and record.key.rank == 0


def _block(record: Record) -> str:
    """The member of the outermost list of modules that a site lies in; "" for none."""
    parts = record.key.site.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])


def _is_op_of(pair: Pair, module: str) -> bool:
    """Whether a pair is of the result of an op of a module."""
    record = pair.reference or pair.target
    if record is None or not is_inner(record.key) or not record.key.slot.startswith("output"):
        return False
    return module_of(record.key.site) == module


def _sources(pair: Pair) -> tuple[str, ...]:
    """Key texts of the target's records behind a pair."""
    if pair.origin is not None:
        return pair.origin.target
    return (pair.target.key.text,) if pair.target else ()


def _passes(check: str, path: Path) -> bool:
    """Whether a user's check takes a run as good."""
    done = subprocess.run(check, shell=True, env={**os.environ, "TCAP_RUN": str(path)}, check=False)
    status = done.returncode
    if status == _SKIP or not 0 <= status <= 127:
        raise UsageError(
            f"check {abbreviate(check)!r}: ended with {status}, expected 0 for good or 1 to 127 for bad"
        )
    return status == 0
