"""Capture a run of a model into an archive: `capture` in a `with` block, `capture_workload` in one call."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from tensorcap.adapters import Adapter, adapter_for
from tensorcap.recording import (
    CaptureOptions,
    Level,
    Logged,
    PlainLog,
    Point,
    Recorder,
    RecordFilter,
    Summary,
    Tally,
    summarise,
)
from tensorcap.session.process_rank import process_rank
from tensorcap.wording import counted
from tensorcap.workload import class_name, describe_process, find_functions, now, redact
from tensorcap_formats.errors import CaptureError, TensorcapError, UsageError
from tensorcap_formats.keys import module_site
from tensorcap_formats.ranks import rank_path
from tensorcap_formats.writing import Writer

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensorcap.recording import Substitution
    from tensorcap.workload import Workload
    from tensorcap_formats.progress import Progress

_UNDER_CAPTURE: Final[set[int]] = set()  # ids of models
_LOCK: Final = threading.Lock()
_FORKS_ARE_WATCHED: Final = threading.Event()
_RECORDERS: Final[WeakSet[Recorder]] = WeakSet()  # that a forked process has to switch off


def capture(
    model: Any,
    path: str | os.PathLike[str] | None,
    *,
    only: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    inputs: bool = True,
    level: Level = "module",
    decompositions: str = "",
    ops_in: str | Iterable[str] = (),
    watch: str | Iterable[str] = (),
    grads: bool = False,
    params: bool | None = None,
    eager: bool = False,
    steps: str | Iterable[range | int] = (),
    sample: int | None = None,
    slices: str | Iterable[str] = (),
    max_bytes: int | str | None = None,
    injectable: str | Iterable[str] = (),
    inner: bool = False,
    stats_only: bool = False,
    container: str | None = None,
    fsync: bool = False,
    log: PlainLog | None = None,
    run: Mapping[str, Any] | None = None,
    substitution: Substitution | None = None,
    progress: Progress | None = None,
) -> Capture:
    """Capture what happens in a model during a `with` block.

    Every call of every module is recorded: its inputs by argument name, its outputs by field, at the
    moment of the call. Each call of the model itself is a step. The model computes what it would compute
    anyway, and has no trace of the capture afterwards. If the block ends by an error, what was captured
    until then is kept as an incomplete archive: at the path, or beside it (`ref.incomplete.h5`) if an
    archive was there before. If the disk fails, recording ends, the block goes on, and its end raises the
    error. A process that is forked in the block records nothing.

    Args:
        model: A torch module, or a model of another framework that has an adapter.
        path: Where to put the archive: `.h5`, `.zarr` or `.safetensors`; an archive that is there is
            replaced when the capture is complete. None counts and writes nothing. Each of several processes
            that run one model together writes its own, `NAME.rankN.h5`; see `tcap merge`.
        only: Globs of what to record, all if empty. One without `/` is for sites (`*.mlp`), any other
            for whole keys (`0/*/output`). A glob that nothing is captured of leads to a warning.
        exclude: Globs of what not to record; they win over `only`.
        inputs: Whether to record the inputs of modules. Those of the model itself are always recorded.
        level: `module`, or `op` to record the result of every op within them too. `export`, for
            `capture_workload` alone, records the nodes of the graph that `torch.export` makes.
        decompositions: At level export, the converter (`coreai`) whose table the graph is decomposed by, so
            that its nodes are those that the converter is given.
        ops_in: Globs of modules; only their ops are recorded, and those of the modules below them.
        watch: Local variables to record, as `package.module:Class.method:variable,variable`; `*` for all
            that hold tensors. What the function returns is recorded too.
        grads: Whether to record the gradients of activations and of parameters, if there is a backward.
        params: Whether to record parameters and buffers, once. None keeps their digests and statistics
            alone, False neither.
        eager: Whether what is compiled, and fused attention of `torch.nn`, run in the block as the plain
            code that they were made from, so that all modules are seen; values may differ by rounding.
        steps: The steps to record: numbers and ranges, or a text, `0,1,5-9`; all if empty.
        sample: Record at most this many calls of each site, the first ones, over all steps.
        slices: Record only a part of tensors: `[..., :64]`, or `GLOB=[:, -1:]` for what a glob, as in
            `only`, names; the first that fits counts. Inputs of the model itself are kept whole.
        max_bytes: Stop recording before the archive holds more bytes of tensors than this; a text may
            have a unit, `2GiB`.
        injectable: Which values, `input` or `output`, later runs of the same model are going to replace: a
            model that has to be compiled is then compiled at once so that they can be.
        inner: Whether a graph that MAX compiles prints into files what it cannot return: what lies within
            subgraphs, branches and loops, of which the last run is kept.
        stats_only: Keep statistics and hashes, no values.
        container: `hdf5`, `zarr` or `safetensors`; by the path's suffix if None.
        fsync: Make each tensor durable against a power cut.
        log: Prints each tensor as it is recorded.
        run: Further run metadata.
        substitution: Archived tensors that take the place of the model's own, which are recorded first; the
            model then computes something else, and the archive says what.
        progress: Receives the model and the precision that it runs in as a stage, what the run waits for,
            such as a compiler, as further ones, and the count of tensors that are recorded; from whatever
            thread records them.

    Returns:
        A context manager; `pause`, `resume` and `paused` choose what part of the block is recorded, and
        `summary` has the outcome.

    Raises:
        UsageError: A glob matches no module; the model is under capture already; there is no adapter.
        CaptureError: Nothing was captured; no archive is left.
        WriteError: The disk is full, or something else went wrong with it; see `tcap recover`.

    Example:
        >>> import torch, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> with capture(model, folder.name + "/ref.h5") as cap:
        ...     _ = model(torch.ones(1, 2))
        >>> cap.summary.tensors, cap.summary.steps
        (6, 1)
        >>> folder.cleanup()
    """
    options = CaptureOptions.parse(
        only=only,
        exclude=exclude,
        inputs=inputs,
        level=level,
        decompositions=decompositions,
        ops_in=ops_in,
        watch=watch,
        grads=grads,
        params=params,
        eager=eager,
        steps=steps,
        sample=sample,
        slices=slices,
        max_bytes=max_bytes,
        injectable=injectable,
        inner=inner,
        stats_only=stats_only,
        container=container,
        fsync=fsync,
    )
    return Capture(model, path, options, log=log, run=run, substitution=substitution, progress=progress)


class Capture:
    """A capture that is under way, or over; `capture` makes it, for one `with` block.

    Attributes:
        path: Where the archive is, or will be; None for a dry run.
        summary: The outcome, once it is over.
        tally: The records of a dry run.
        log: What prints the records, if anything does.
        substitution: What takes the place of the model's own tensors, if anything does.
    """

    def __init__(
        self,
        model: Any,
        path: str | os.PathLike[str] | None,
        options: CaptureOptions,
        *,
        log: PlainLog | None = None,
        run: Mapping[str, Any] | None = None,
        substitution: Substitution | None = None,
        progress: Progress | None = None,
        warns: bool = True,
    ) -> None:
        self._adapter: Adapter = adapter_for(model)
        self._rank = process_rank(self._adapter)
        self.path = None if path is None else self._own_path(Path(path))
        self.summary: Summary | None = None
        self.tally = Tally()
        self.log = log
        self.substitution = substitution
        self._model = model
        self._options = options
        self._filter = RecordFilter(options)
        self._run = dict(run or {})
        self._progress = progress
        self._workload: Workload | None = None  # level export needs the model and its inputs
        self._run_graph: Callable[[Recorder], None] | None = None
        self._writer: Writer | None = None
        self._process = os.getpid()
        self._warns = warns  # of globs that matched nothing; not if the caller prints the summary

    @property
    def run(self) -> Mapping[str, Any]:
        """The run's metadata, as known when the capture began."""
        return self._metadata

    def pause(self) -> None:
        """Record nothing until `resume`; forwards in between count as no steps."""
        self._recorder.is_paused = True

    def resume(self) -> None:
        """Record again."""
        self._recorder.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within a block."""
        before = self._recorder.is_paused
        self.pause()
        try:
            yield
        finally:
            self._recorder.is_paused = before

    def keep_inputs(self, inputs: Any) -> None:
        """Record the inputs of the run, if they are not those that the model itself is called with.

        Args:
            inputs: Arguments by name, or positional ones; kept as slots `given.NAME` of the model.
        """
        self._adapter.record_inputs(inputs, self._recorder)

    def __enter__(self) -> Self:
        with ExitStack() as hooks:
            hooks.enter_context(_claimed(self._model))
            points = self._find_points()
            if self._options.level == "export":
                if self.substitution is not None:
                    raise UsageError("level export runs a graph, in which nothing can be substituted")
                self._run_graph = self._adapter.export(self._require_workload(), self._options)
            digests = self._options.params is None and self.path is not None
            described = self._adapter.describe(self._model, digests=digests)
            self._metadata = {**described, **describe_process(), **self._run}
            self._metadata["scope"] = self._options.describe()
            if self._rank is not None:
                self._metadata["ranks"] = {"count": self._rank.count, "rank": self._rank.rank}
            self._started_seconds = time.perf_counter()
            if self.path is not None:
                self._writer = Writer(
                    self.path,
                    run=self._metadata,
                    stats_only=self._options.stats_only,
                    container=self._options.container,
                    fsync=self._options.fsync,
                )
            try:
                sink = self._writer or self.tally
                logged = sink if self.log is None else Logged(sink, self.log)
                self._recorder = Recorder(logged, points, self._filter, self._progress)
                _watch_forks(self._recorder)
                wanted = {n for n, p in points.items() if p.is_capturable and p.wanted is not False}
                if self._run_graph is None:
                    wanted |= self._bind_substitution(points)
                    tap = self._adapter.tap(
                        self._model, wanted, self._recorder, self._options, self.substitution
                    )
                    hooks.enter_context(tap)
                hooks.enter_context(self._recorder.stage(self._stage_text()))
            except BaseException:
                self._abandon(discard=True)
                raise
            self._hooks = hooks.pop_all()
        return self

    def _own_path(self, path: Path) -> Path:
        """The path of this process's archive: several that run one model have each its own."""
        return path if self._rank is None else rank_path(path, self._rank.rank)

    def _stage_text(self) -> str:
        """What runs, for the progress."""
        model = self._metadata["model"]
        file = f" from {model['file']}" if model["file"] else ""
        precision = f"in {self._metadata['dtype']} on {self._metadata['device']}"
        return f"capturing {model['class']}{file} {precision}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.close()
        if self._process != os.getpid():
            return  # forked in the block: the archive belongs to the parent process
        failure = self._recorder.failure
        if failure is None and error is None and self.substitution is not None:
            failure = self.substitution.failure
        if failure is not None:
            self._abandon()
            if error is None:
                raise failure
            _add_note(error, failure)
        elif error is not None:
            self._keep_incomplete(error)
        elif not any(point.records for point in self._recorder.points.values()):
            self._abandon(discard=True)
            raise self._nothing_captured()
        else:
            self._finish(self.path, is_complete=True)
            if self._warns and self.summary is not None and self.summary.unmatched:
                globs = ", ".join(map(repr, self.summary.unmatched))
                warnings.warn(f"nothing was captured of {globs}", stacklevel=2)

    def _bind_substitution(self, points: Mapping[str, Point]) -> set[str]:
        """Find the sites at which tensors are to be replaced; return their names."""
        if self.substitution is None:
            return set()
        capturable = {name: point for name, point in points.items() if point.is_capturable}
        sites = self.substitution.bind({point.site: point.aliases for point in capturable.values()})
        return {name for name, point in capturable.items() if point.site in sites}

    def _require_workload(self) -> Workload:
        if self._workload is None:
            raise UsageError(
                f"{class_name(self._model)}: level export is not for a block, expected a workload",
                hint="capture_workload(Workload(model, inputs), path, level='export'), or level op.",
            )
        return self._workload

    def _find_points(self) -> dict[str, Point]:
        """List the model's sites; refuse globs that match none of them."""
        points = {}
        as_plain_code = self._options.eager or self._options.level == "export"
        for site in self._adapter.list_sites(self._model, eager=as_plain_code):
            name = module_site(site.name)
            aliases = tuple(map(module_site, site.aliases))
            wanted = self._filter.keeps_site(name, aliases)
            points[site.name] = Point(name, aliases, site.reason, site.is_capturable, wanted)
        known = [name for point in points.values() for name in (point.site, *point.aliases)]
        printed = () if self.log is None else self.log.globs
        self._filter.check_globs(class_name(self._model), known, printed)
        return points

    def _finish(self, path: Path | None, *, is_complete: bool) -> None:
        recorder = self._recorder
        points = recorder.points
        called = [name for name, point in points.items() if point.calls and point.kind == "module"]
        if called and not points[""].calls:
            points[""].note = "not seen to be called itself, so that all calls are of one step"
        sources = self._adapter.read_sources(self._model, called)
        run = {
            **self._metadata,
            **recorder.facts,
            "inputs": recorder.inputs,
            "steps": recorder.last_step + 1,
            **self._describe_outcome(),
            "points": [entry for point in points.values() if point.is_listed for entry in point.describe()],
            "sources": {**sources, **find_functions(recorder.lines, sources)},
            "finished": now(),
            "duration_seconds": round(time.perf_counter() - self._started_seconds, 3),
        }
        if self._writer is not None:
            self.path = self._writer.close(run=run, complete=is_complete, path=path)
        self.summary = summarise(
            self.path, self._writer or self.tally, recorder, self._filter, is_complete=is_complete
        )

    def _describe_outcome(self) -> dict[str, Any]:
        """Run metadata: phases of the steps, what was injected, and what ended the recording."""
        recorder = self._recorder
        outcome: dict[str, Any] = {}
        if recorder.phases:
            steps = range(recorder.last_step + 1)
            outcome["phases"] = [recorder.phases.get(step, "forward") for step in steps]
        if len(set(recorder.threads)) > 1:
            outcome["threads"] = recorder.threads
        if recorder.threaded:
            outcome["threaded_sites"] = list(recorder.threaded)
        if self.substitution is not None:
            outcome["injected"] = self.substitution.describe()
        if self._rank is not None:
            outcome["ranks"] = {**self._metadata["ranks"], "tensors": recorder.placements.describe()}
        if recorder.stopped is not None:
            outcome["stopped"] = {"at": recorder.stopped, "max_bytes": self._options.max_bytes}
        return outcome

    def _keep_incomplete(self, error: BaseException) -> None:
        """Close the archive after an error of the run; that error is raised whatever happens here."""
        if self.path is None or self._writer is None or not self._writer.records_count:
            self._abandon(discard=True)
            return
        self._metadata["error"] = {
            "type": class_name(error),
            "message": redact(str(error)),
            "last_point": self._recorder.last_point,
        }
        try:
            self._finish(incomplete_path(self.path), is_complete=False)
            note = f"what was captured until then is in {self.path}, marked incomplete"
        except TensorcapError as trouble:
            note = str(trouble)
        _add_note(error, note)

    def _abandon(self, *, discard: bool = False) -> None:
        if self._writer is not None:
            self._writer.abandon(discard=discard)

    def _nothing_captured(self) -> CaptureError:
        points = self._recorder.points.values()
        reasons = {
            point.describe()[0].get("reason", "") for point in points if point.status == "not-capturable"
        }
        counts = Counter(point.status for point in points)
        counts_text = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        if reasons:
            hint = f"Not capturable: {'; '.join(sorted(reasons))}."
        elif any(point.calls for point in points):
            steps = self._recorder.last_step + 1
            asked = "globs and limits" if self._options.limits_calls else "globs"
            which = "only step, 0," if steps == 1 else f"{steps} steps"
            hint = f"The model was called; no record of its {which} fits the {asked}."
        else:
            hint = "Call the model in the block; what torch.compile made before the block is not seen."
        modules = counted(len(points), "module")
        return CaptureError(
            f"{class_name(self._model)}: nothing was captured, of {modules}: {counts_text}",
            hint=hint,
        )


def _add_note(error: BaseException, note: object) -> None:
    """Add a line to the text of an error, as `add_note` does since Python 3.11."""
    error.__notes__ = [*getattr(error, "__notes__", ()), f"tensorcap: {note}"]


def capture_workload(
    workload: Workload,
    path: str | os.PathLike[str] | None,
    *,
    run: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Capture:
    """Run a workload once, under capture.

    Args:
        workload: A model, its inputs and its seed.
        path: As for `capture`.
        run: Further run metadata.
        progress: As for `capture`.
        options: Further arguments of `capture`.

    Returns:
        The capture, which is over.
    """
    adapter = adapter_for(workload.model)
    if workload.seed is not None:
        adapter.seed(workload.seed)
    cap = capture(workload.model, path, run=run, progress=progress, **options)
    cap._warns = False  # the caller has the summary
    cap._workload = workload
    with cap:
        if workload.run is not None:
            cap.keep_inputs(workload.inputs)
        if cap._run_graph is None:
            adapter.run(workload, grads=cap._options.grads)
        else:
            cap._run_graph(cap._recorder)
    return cap


def incomplete_path(path: Path) -> Path:
    """Where to put an incomplete archive: at the path, or beside it if something is there."""
    name, number = path.name, 1
    while os.path.lexists(path.with_name(name)):
        name = f"{path.stem}.incomplete{number if number > 1 else ''}{path.suffix}"
        number += 1
    return path.with_name(name)


def _watch_forks(recorder: Recorder) -> None:
    """Switch the recorder off in every process that is forked off this one."""
    with _LOCK:
        if not _FORKS_ARE_WATCHED.is_set() and hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_switch_off
            )
            _FORKS_ARE_WATCHED.set()
        _RECORDERS.add(recorder)


def _switch_off() -> None:
    for recorder in _RECORDERS:
        recorder.is_off = True
    _UNDER_CAPTURE.clear()
    _LOCK.release()


@contextmanager
def _claimed(model: object) -> Iterator[None]:
    """Refuse a second capture of the model until the block ends."""
    with _LOCK:
        if id(model) in _UNDER_CAPTURE:
            raise UsageError(
                f"{class_name(model)}: is under capture already",
                hint="End that capture first; a script under `tcap capture script` has none of its own.",
            )
        _UNDER_CAPTURE.add(id(model))
    try:
        yield
    finally:
        _UNDER_CAPTURE.discard(id(model))
