"""Find the wrong module by runs of the target, in which results are grafted up to a cut.

Everything that the target computes up to a cut is replaced by what the reference computed there. If the final
output is then as good as it can be, the mistake lies before the cut, else behind it; about log2(n) runs name
the result at which it is made. A file keeps what runs came to, so that an interrupted search goes on.
"""

from __future__ import annotations

import math
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tensorcap.alignment import (
    NO_MAPPING,
    Alignment,
    MappingSource,
    aligned_if_needed,
    fed_in_common,
    fitting,
)
from tensorcap.comparison import POLICY, Comparison, Divergence, Pair, compare
from tensorcap.recording import Substitution
from tensorcap.rerun import RunLog, fitted_to, reverse
from tensorcap.runs import PartialArchive, is_inner, is_result, ops_of
from tensorcap.session import capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError, abbreviate
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import ROOT_SITE, Key, module_of
from tensorcap_formats.open import Source, open_archive, opened
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView

if TYPE_CHECKING:
    from tensorcap.workload import Workload

Blame = Literal["module", "caller"]
Level = Literal["module", "op"]
MakesArchive = Callable[[Path, tuple[str, ...]], Path]

_AS_GOOD: Final = 1.5  # times the error that is left with everything grafted
_SHOWN: Final = 3  # ops: those behind the first follow from it
_SKIP: Final = 125  # exit status of a check that cannot tell, as for `git bisect run`
_ALL, _NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the target.

    Attributes:
        cut: Key text of the last result that was grafted; `all`, or `none`.
        error: Relative error of the final output, no unit; None if a check judged.
        is_good: Whether the final output was good.
    """

    cut: str
    error: float | None
    is_good: bool


@dataclass(frozen=True, slots=True)
class LiveBisection:
    """The result at which the mistake is made, by runs of the target.

    Attributes:
        cuts: Count of results that could be grafted.
        key: Key text, in the target's names, of the result at which the mistake is made; "" if there is none.
        module: The wrong module, in the reference's names; "" if there is none.
        blame: Whether the module's own result is wrong for what it was given, or what it was given by the
            code around it, which is then `module`.
        limit: Error of the final output up to which a run is good, with everything grafted.
        runs: All runs that led there, in order.
        divergence: The first difference within the module, with everything before it grafted; None if the
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
        """0 if no module is wrong, else 1 (BIS-13)."""
        return 1 if self.key else 0

    def to_json(self) -> dict[str, Any]:
        """The members that `tcap bisect --json` prints, as JSON values."""
        return {
            "format": "tensorcap-live-bisection",
            "version": 1,
            "cuts": self.cuts,
            "key": self.key or None,
            "module": self.module or None,
            "blame": self.blame if self.key else None,
            "divergence": self.divergence.pair.key if self.divergence else None,
            "ops": [{"key": pair.key, "status": pair.status} for pair in self.ops],
            "limit": json_value(self.limit),
            "runs": json_value(self.runs),
            "exit_status": self.exit_status,
        }


def bisect_live(
    reference: Source,
    target_model: Workload,
    *,
    mapping: MappingSource | None = None,
    limit: float | None = None,
    check: str | None = None,
    level: Level = "module",
    reference_ops: MakesArchive | None = None,
    state: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> LiveBisection:
    """Find at which result of a target its mistake is made, by about log2(n) runs.

    Args:
        reference: The trusted archive, open or a path.
        target_model: The target, its inputs and its seed.
        mapping: As for `compare`; the target's first run is what it is resolved against.
        limit: Relative error of the final output that is good; by default 1.5 times that with everything
            grafted, and at least what rounding makes of what comes behind a cut.
        check: A command that judges in the place of the error: exit status 0 is good, 1 to 124, 126 and 127
            are bad, as for `git bisect run`. `TCAP_RUN` in its environment is the archive of a run, which
            holds what the model was given and gave.
        level: `op` to go on to the op within the module.
        reference_ops: Makes an archive of the reference's ops in some sites at a path, and returns it, if
            the reference has none.
        state: A file that keeps what runs came to, so that an interrupted search goes on.
        progress: Shows what is run, and how many runs there were.

    Raises:
        UsageError: Nothing can be grafted; the reference's final output has no counterpart; a check cannot
            tell; the state is of another search.
        CaptureError: A run fails.
    """
    with ExitStack() as stack:
        trusted = stack.enter_context(opened(reference))
        search = _Search(
            stack,
            trusted,
            target_model,
            mapping=mapping,
            limit=limit,
            check=check,
            state=None if state is None else Path(state),
            progress=progress or Silent(),
        )
        return search.run(level, reference_ops)


class _Search:
    """One search under way."""

    def __init__(
        self,
        stack: ExitStack,
        reference: Archive,
        workload: Workload,
        *,
        mapping: MappingSource | None,
        limit: float | None,
        check: str | None,
        state: Path | None,
        progress: Progress,
    ) -> None:
        """Run the target as it is, and find what of it can be grafted."""
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-")))
        self._reference = reference
        self._workload = workload
        self._given_limit = limit
        self._check = check
        self._progress = progress
        self._runs: list[Run] = []
        self._full = 0.0  # error with everything grafted
        free = stack.enter_context(open_archive(self._capture("free.h5", -1, injectable=("output",))))
        aligned = aligned_if_needed(reference, free, mapping)
        self._is_computed = mapping is None and aligned is not None
        self._mapping: Alignment | str = NO_MAPPING if aligned is None else aligned.alignment
        rows = fed_in_common(reference, free)[1]
        self._mapped = reference if aligned is None else reverse(aligned)
        self._source, self._fed = fitted_to(
            workload.model, self._mapped, rows, free
        )  # runs with grafts get them
        self._precision = POLICY.precision_of_runs(reference.info, free.info, None)
        grafts = {record.key.text for record in self._source.records}
        self._results = [r for r in free.records if r.key.text in grafts and _is_graftable(r)]
        if not self._results:
            raise UsageError(
                f"{self._reference.path}: has no result of a module that the target has",
                hint="tcap align tells what belongs together.",
            )
        self._blocks = [_block_of(record) for record in self._results]
        about = {
            "reference": self._reference.root,
            "results": [record.key.text for record in self._results],
            "check": self._check,
            "limit": self._given_limit,
        }
        self._log = RunLog(state, "bisection", about)
        self._known = {run.cut: run for run in self._log.load(lambda line: Run(**line))}

    def run(self, level: Level, reference_ops: MakesArchive | None) -> LiveBisection:
        """Search for the first cut that makes the final output good.

        1. With all results grafted the output has to be good, else the mistake is made behind them; the error
           that is left sets the limit of what is good.
        2. With none grafted it has to be bad, else nothing is wrong.
        3. A binary search between both finds the result at which it becomes good.
        4. A run with everything before that result grafted shows the module, and the first difference in it.
        """
        low, high = -1, len(self._results) - 1
        full = self._run_at(high, _ALL)
        self._full = full.error or 0.0
        limit = self._limit(high)
        if not full.is_good:
            return self._bisection(self._results[high].key.text, ROOT_SITE, "caller", limit)
        if self._judge(_NONE, self._folder / "free.h5", -1).is_good:
            return self._bisection("", "", "module", limit)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._run_at(middle).is_good else (middle, high)
        wrong = self._results[high].key
        within = self._compare_within(wrong, high, level, reference_ops)
        names = {source: p.key for p in within.pairs if p.target for source in _sources(p)}
        site = Key.parse(names.get(wrong.text, wrong.text)).site
        module = within.divergence.module if within.divergence else site
        blame: Blame = "module" if module == site else "caller"
        return self._bisection(wrong.text, module, blame, limit, within)

    def _bisection(
        self, key: str, module: str, blame: Blame, limit: float, within: Comparison | None = None
    ) -> LiveBisection:
        """Sum up, with the first difference within the module and its ops if it was compared."""
        ops = [
            pair
            for pair in (within.pairs if within else ())
            if not pair.is_green and pair.status != "excluded" and _is_op_of(pair, module)
        ]
        divergence = within.divergence if within else None
        runs = tuple(self._runs)
        return LiveBisection(
            len(self._results), key, module, blame, limit, runs, divergence, tuple(ops[:_SHOWN])
        )

    def _run_at(self, last: int, name: str = "") -> Run:
        """Run the target with all results grafted up to one, unless that is known."""
        cut = name or self._results[last].key.text
        known = self._known.get(cut)
        if known is None:
            return self._judge(cut, self._capture("cut.h5", last, only=(ROOT_SITE,)), last)
        self._runs.append(known)
        return known

    def _judge(self, cut: str, path: Path, last: int) -> Run:
        """Judge a run by the check, or by the error of its final output."""
        if self._check is not None:
            run = Run(cut, None, _passes(self._check, path))
        else:
            error = self._final_error(path)
            run = Run(cut, error, error <= self._limit(last))
        self._runs.append(run)
        self._known[cut] = run
        self._log.add(asdict(run))
        return run

    def _limit(self, last: int) -> float:
        """Error of the final output that is good with all results grafted up to one (BIS-11)."""
        if self._given_limit is not None:
            return self._given_limit
        floor = 0.0
        if self._precision is not None and self._precision.is_wide:
            floor = POLICY.in_proportion(POLICY.wide_total, self._precision).green
        elif self._precision is not None:
            behind = len({block for block in self._blocks[last + 1 :] if block})
            floor = POLICY.envelope_at(behind, self._precision)
        return max(_AS_GOOD * self._full, floor)

    def _final_error(self, path: Path) -> float:
        """Measure the relative error of the final output of a run."""
        comparison = self._compare(self._reference, path, only=f"*{ROOT_SITE}/output*")
        measured = [
            (pair.reference.key.step, pair)
            for pair in comparison.pairs
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

    def _compare_within(
        self, wrong: Key, at: int, level: Level, reference_ops: MakesArchive | None
    ) -> Comparison:
        """Run the target with everything before a result grafted, and compare that with the reference."""
        options: dict[str, Any] = {}
        trusted: Source = self._reference
        if level == "op":
            sites = (wrong.site, wrong.site.rpartition(".")[0] or ROOT_SITE)
            options = {"level": "op", "ops_in": sites}
            if not ops_of(self._reference):
                if reference_ops is None:
                    raise UsageError(
                        f"{self._reference.path}: has no ops, expected those of {wrong.site}",
                        hint="Capture it with --level op, or so that its run can be repeated.",
                    )
                trusted = reference_ops(self._folder / "reference.h5", self._sites_in_reference(wrong))
        path = self._capture("within.h5", at - 1, **options)
        if level == "op" and self._is_computed:  # of a run without ops: it does not say which of them pair
            return compare(trusted, path)
        return self._compare(trusted, path)

    def _sites_in_reference(self, wrong: Key) -> tuple[str, ...]:
        """The modules of the reference that make a result of the target, and those around them."""
        records = self._mapped.sources[wrong.text] if isinstance(self._mapped, ArchiveView) else ()
        sites = dict.fromkeys([record.key.site for record in records] or [wrong.site])
        return tuple(dict.fromkeys(s for site in sites for s in (site, site.rpartition(".")[0] or ROOT_SITE)))

    def _compare(self, reference: Source, path: Path, **options: Any) -> Comparison:
        """Compare a run with the reference, of which it may hold a part only."""
        with opened(reference) as trusted, open_archive(path) as run:
            mapping = self._mapping
            if isinstance(mapping, Alignment):
                mapping = fitting(mapping, trusted, run)
            return compare(trusted, run, mapping=mapping, **options)

    def _capture(self, name: str, last: int, **options: Any) -> Path:
        """Run the target, with all results grafted up to one; -1 grafts nothing."""
        path = self._folder / name
        how = "as it is" if last < 0 else f"grafted up to {self._results[last].key.text}"
        self._progress.stage(f"running the target {how}")
        self._progress.advance(len(self._runs) + 1, None)
        if last >= 0:
            part = PartialArchive(self._source, [self._source.get(r.key) for r in self._results[: last + 1]])
            options["substitution"] = Substitution(part, outputs=("*/output*",), fed=self._fed)
        run = capture_workload(self._workload, path, params=False, **options)
        return run.path or path


def _is_graftable(record: Record) -> bool:
    return is_result(record.key) and record.key.site != ROOT_SITE and record.key.rank == 0


def _block_of(record: Record) -> str:
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
    """Run a user's check on the archive of a run: whether it is good."""
    process = subprocess.run(check, shell=True, env={**os.environ, "TCAP_RUN": str(path)}, check=False)
    status = process.returncode
    if status == _SKIP or not 0 <= status <= 127:
        raise UsageError(
            f"check {abbreviate(check)!r}: ended with {status}, expected 0 for good or 1 to 127 for bad"
        )
    return status == 0
