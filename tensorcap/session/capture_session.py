"""Capture a run of a model into an archive."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from tensorcap.adapters.protocol import Adapter, adapter_for
from tensorcap.recording.limits import Limits
from tensorcap.recording.plain_log import Logged, PlainLog
from tensorcap.recording.point import Point
from tensorcap.recording.recorder import Recorder
from tensorcap.recording.scope import Level, Plan, Scope, as_tuple
from tensorcap.recording.summary import Summary, Tally, summarise
from tensorcap.workload.metadata import about_process, now, redact
from tensorcap.workload.sources import class_name
from tensorcap_formats.errors import CaptureError, TensorcapError, UsageError
from tensorcap_formats.keys import module_site
from tensorcap_formats.writing.writer import Writer

if TYPE_CHECKING:
    from typing_extensions import Self

    from tensorcap.recording.substitution import Substitution
    from tensorcap.workload.workload import Workload

_UNDER_CAPTURE: Final[set[int]] = set()  # ids of models
_LOCK: Final = threading.Lock()
_FORKS_ARE_WATCHED: Final = threading.Event()
_RECORDERS: Final[WeakSet[Recorder]] = WeakSet()  # that a forked process has to switch off


def capture(
    model: Any,
    path: str | os.PathLike[str] | None,
    *,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    inputs: bool = True,
    level: Level = "module",
    ops_in: str | Iterable[str] = (),
    watch: str | Iterable[str] = (),
    grads: bool = False,
    params: bool = False,
    eager: bool = False,
    steps: str | Iterable[range | int] = (),
    sample: int | None = None,
    slices: str | Iterable[str] = (),
    max_bytes: int | str | None = None,
    log: PlainLog | None = None,
    stats_only: bool = False,
    run: Mapping[str, Any] | None = None,
    container: str | None = None,
    fsync: bool = False,
    substitution: Substitution | None = None,
    injectable: str | Iterable[str] = (),
    inner: bool = False,
) -> Capture:
    """Capture what happens in a model during a `with` block.

    Every call of every module is recorded: its inputs by argument name, its outputs by field, at the
    moment of the call. Each call of the model itself is a step. The model computes what it would compute
    anyway, and has no trace of the capture afterwards. If the block ends by an error, what was captured
    until then is kept as an incomplete archive: at the path, or beside it (`ref.incomplete.h5`) if an
    archive was there before. A process that is forked in the block records nothing.

    Args:
        model: A torch module, or a model of another framework that has an adapter.
        path: Where to put the archive: `.h5`, `.zarr` or `.safetensors`; an archive that is there is
            replaced when the capture is complete. None counts and writes nothing.
        include: Globs of what to record, all if empty. One without `/` is for sites (`*.mlp`), any other
            for whole keys (`0/*/output`). One of which nothing is captured is warned of.
        exclude: Globs of what not to record; they win over `include`.
        inputs: Whether to record the inputs of modules. Those of the model itself are always recorded.
        level: `module`, or `op` to record the result of every op within them too. `export`, for
            `capture_workload` alone, records the nodes of the graph that `torch.export` makes.
        ops_in: Globs of modules; only their ops are recorded, and those of the modules below them.
        watch: Local variables to record, as `package.module:Class.method:variable,variable`; `*` for all
            that hold tensors. What the function returns is recorded too.
        grads: Whether to record the gradients of activations and of parameters, if there is a backward.
        params: Whether to record parameters and buffers, once.
        eager: Whether what is compiled, and the fused layers of `torch.nn`, run in the block as the plain
            code that they were made from, so that all modules are seen; values may differ by rounding.
        steps: The steps to record: numbers and ranges, or a text, `0,1,5-9`; all if empty.
        sample: Record at most the first so many calls of each site, over all steps.
        slices: Record only a part of tensors: `[..., :64]`, or `GLOB=[:, -1:]` for what a glob, as in
            `include`, names; the first that fits counts. What the model itself is given is kept whole.
        max_bytes: Stop recording before the archive holds more bytes of tensors than this; a text may
            have a unit, `2GiB`.
        log: Prints each tensor as it is recorded.
        stats_only: Keep statistics and hashes, no values.
        run: Further run metadata.
        container: `hdf5`, `zarr` or `safetensors`; by the path's suffix if None.
        fsync: Make each tensor durable against a power cut.
        substitution: Archived tensors that take the place of the model's own, which are recorded first; the
            model then computes something else, and the archive says what.
        injectable: Which values, `input` or `output`, later runs of the same model are going to replace: a
            model that has to be compiled then makes them replaceable at once.
        inner: Whether a graph that MAX compiles prints into files what it cannot give out: what lies within
            subgraphs, branches and loops, of which the last run is left.

    Returns:
        A context manager; `pause`, `resume` and `paused` say what part of the block is recorded, and
        `summary` what came of it.

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
    return Capture(
        model,
        path,
        scope=Scope(
            include,
            exclude,
            Limits.of(steps=steps, sample=sample, max_bytes=max_bytes, slices=slices),
        ),
        plan=Plan(
            inputs,
            level,
            as_tuple(ops_in),
            as_tuple(watch),
            grads,
            params,
            eager,
            as_tuple(injectable),
            inner,
        ),
        log=log,
        stats_only=stats_only,
        run=run,
        container=container,
        fsync=fsync,
        substitution=substitution,
    )


class Capture:
    """A capture that is under way, or over; made by `capture`, for one `with` block.

    Attributes:
        path: Where the archive is, or will be; None for a dry run.
        summary: What came of it, once it is over.
        tally: The records of a dry run.
        log: What prints the records, if anything does.
        substitution: What takes the place of the model's own tensors, if anything does.
    """

    def __init__(
        self,
        model: Any,
        path: str | os.PathLike[str] | None,
        *,
        scope: Scope,
        plan: Plan,
        log: PlainLog | None = None,
        run: Mapping[str, Any] | None = None,
        substitution: Substitution | None = None,
        **options: Any,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.summary: Summary | None = None
        self.tally = Tally()
        self._model = model
        self._adapter: Adapter = adapter_for(model)
        self._scope = scope
        self._plan = plan
        self.log = log
        self._run = dict(run or {})
        self.substitution = substitution
        self._options = options  # of the writer
        self._workload: Workload | None = None  # set where the level is for the model and its inputs
        self._run_graph: Callable[[Recorder], None] | None = None
        self._writer: Writer | None = None
        self._process = os.getpid()
        self._warns = True

    @property
    def run(self) -> Mapping[str, Any]:
        """The run's metadata, as known when the capture began."""
        return self._metadata

    @property
    def progress(self) -> str:
        """How far it is, as a short text."""
        sink = self._writer or self.tally
        count = f"{sink.records_count} tensors, last {self._recorder.last_point or 'none'}"
        return self._recorder.waiting.text or count

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
        """Record what the run is given, where that is not what the model itself will be given.

        Args:
            inputs: Arguments by name, or positional ones; kept as slots `given.NAME` of the model.
        """
        self._adapter.keep_inputs(inputs, self._recorder)

    def __enter__(self) -> Self:
        with ExitStack() as hooks:
            hooks.enter_context(_claimed(self._model))
            points = self._points()
            if self._plan.level == "export":
                if self.substitution is not None:
                    raise UsageError("level export runs a graph, in which nothing can be substituted")
                self._run_graph = self._adapter.export(self._exportable(), self._plan)
            self._metadata = {**self._adapter.describe(self._model), **about_process(), **self._run}
            self._metadata["scope"] = {**self._scope.describe(), **self._plan.describe()}
            self._started_seconds = time.perf_counter()
            if self.path is not None:
                self._writer = Writer(self.path, run=self._metadata, **self._options)
            try:
                sink = self._writer or self.tally
                logged = sink if self.log is None else Logged(sink, self.log)
                self._recorder = Recorder(logged, points, self._scope)
                _watch_forks(self._recorder)
                wanted = {n for n, p in points.items() if p.is_capturable and p.wanted is not False}
                if self._run_graph is None:
                    wanted |= self._substituted(points)
                    tap = self._adapter.tap(
                        self._model, wanted, self._recorder, self._plan, self.substitution
                    )
                    hooks.enter_context(tap)
            except BaseException:
                self._abandon(discard=True)
                raise
            self._hooks = hooks.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.close()
        if self._process != os.getpid():
            return  # forked in the block: the archive is the other process's
        failure = self._recorder.failure
        if failure is None and error is None and self.substitution is not None:
            failure = self.substitution.failure
        if failure is not None:
            self._abandon()
            if error is None:  # somebody caught it
                raise failure
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

    def _substituted(self, points: Mapping[str, Point]) -> set[str]:
        """Names of the sites at which tensors are to be replaced."""
        if self.substitution is None:
            return set()
        can = {name: point for name, point in points.items() if point.is_capturable}
        found = self.substitution.bind({point.site: point.aliases for point in can.values()})
        return {name for name, point in can.items() if point.site in found}

    def _exportable(self) -> Workload:
        if self._workload is None:
            raise UsageError(
                f"{class_name(self._model)}: level export is not for a block, expected a workload",
                hint="capture_workload(Workload(model, inputs), path, level='export'), or level op.",
            )
        return self._workload

    def _points(self) -> dict[str, Point]:
        points = {}
        as_plain_code = self._plan.eager or self._plan.level == "export"
        for site in self._adapter.sites(self._model, eager=as_plain_code):
            name = module_site(site.name)
            aliases = tuple(map(module_site, site.aliases))
            wanted = self._scope.of_site(name, aliases)
            points[site.name] = Point(name, aliases, site.reason, site.is_capturable, wanted)
        known = [name for point in points.values() for name in (point.site, *point.aliases)]
        printed = () if self.log is None else self.log.globs
        self._scope.check(class_name(self._model), known, printed)
        return points

    def _finish(self, path: Path | None, *, is_complete: bool) -> None:
        recorder = self._recorder
        points = recorder.points
        called = [name for name, point in points.items() if point.calls and point.kind == "module"]
        if called and not points[""].calls:
            points[""].note = "not seen to be called itself, so that all calls are of one step"
        run = {
            **self._metadata,
            **recorder.facts,
            "inputs": recorder.inputs,
            "steps": recorder.last_step + 1,
            **self._what_became(),
            "points": [entry for point in points.values() if point.is_listed for entry in point.describe()],
            "sources": self._adapter.sources(self._model, called),
            "finished": now(),
            "duration_seconds": round(time.perf_counter() - self._started_seconds, 3),
        }
        if self._writer is not None:
            self.path = self._writer.close(run=run, complete=is_complete, path=path)
        self.summary = summarise(
            self.path, self._writer or self.tally, recorder, self._scope, is_complete=is_complete
        )

    def _what_became(self) -> dict[str, Any]:
        """Run metadata of what the steps were of, and of what ended the recording."""
        recorder = self._recorder
        found: dict[str, Any] = {}
        if recorder.phases:
            steps = range(recorder.last_step + 1)
            found["phases"] = [recorder.phases.get(step, "forward") for step in steps]
        if self.substitution is not None:
            found["injected"] = self.substitution.describe()
        if recorder.stopped is not None:
            found["stopped"] = {"at": recorder.stopped, "max_bytes": self._scope.limits.max_bytes}
        return found

    def _keep_incomplete(self, error: BaseException) -> None:
        """Close the archive after an error of the run, which goes on its way whatever happens here."""
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
            note = f"tensorcap: what was captured until then is in {self.path}, marked incomplete"
        except TensorcapError as trouble:
            note = f"tensorcap: {trouble}"
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # as add_note does, since Python 3.11

    def _abandon(self, *, discard: bool = False) -> None:
        if self._writer is not None:
            self._writer.abandon(discard=discard)

    def _nothing_captured(self) -> CaptureError:
        points = self._recorder.points.values()
        reasons = {
            point.describe()[0].get("reason", "") for point in points if point.status == "not-capturable"
        }
        counts = Counter(point.status for point in points)
        found = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        if reasons:
            hint = f"Not capturable: {'; '.join(sorted(reasons))}."
        elif any(point.calls for point in points):
            steps = self._recorder.last_step + 1
            asked = "globs" if self._scope.limits.are_none else "globs and limits"
            which = "only step, 0," if steps == 1 else f"{steps} steps"
            hint = f"The model was called; no record of its {which} fits the {asked}."
        else:
            hint = "Call the model in the block; what torch.compile made before the block is not seen."
        return CaptureError(
            f"{class_name(self._model)}: nothing was captured, of {len(points)} modules: {found}", hint=hint
        )


Around = Callable[[Capture], AbstractContextManager[Any]]  # lives as long as a run does, to show its progress


def capture_workload(
    workload: Workload,
    path: str | os.PathLike[str] | None,
    *,
    run: Mapping[str, Any] | None = None,
    around: Around | None = None,
    **options: Any,
) -> Capture:
    """Run a workload once, under capture.

    Args:
        workload: A model, its inputs and its seed.
        path: As for `capture`.
        run: Further run metadata.
        around: Makes a context manager that lives as long as the run does, to show its progress.
        options: Further arguments of `capture`.

    Returns:
        The capture, which is over.
    """
    adapter = adapter_for(workload.model)
    if workload.seed is not None:
        adapter.seed(workload.seed)
    cap = capture(workload.model, path, run=run, **options)
    cap._warns = False  # the caller has the summary
    cap._workload = workload
    with cap, (around or nullcontext)(cap):
        if workload.run is not None:
            cap.keep_inputs(workload.inputs)
        if cap._run_graph is None:
            adapter.run(workload, grads=cap._plan.grads)
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
    """Have the recorder switched off in every process that is forked off this one."""
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
    """Keep a second capture off the model."""
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
