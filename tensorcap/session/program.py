"""Capture a model that only other code has: the first one that the code of a block, or a script, calls."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Final, TextIO

from tensorcap.adapters import CalledRoot, adapter_named
from tensorcap.recording import CaptureOptions, PlainLog
from tensorcap.session.capture_session import Capture, capture
from tensorcap.session.process_rank import process_rank
from tensorcap.wording import counted, some
from tensorcap.workload import MODEL_MODULES, Script, as_main, compile_script, replace_attribute
from tensorcap_formats.errors import CaptureError, TensorcapError, abbreviate, did_you_mean, missing_package
from tensorcap_formats.progress import Progress
from tensorcap_formats.ranks import rank_path
from tensorcap_formats.writing import Writer


@dataclass
class Called:
    """The models that the code of a block calls.

    Attributes:
        capture: The capture of the first model; None before it is called.
        roots: The models that were called so far.
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
    """Capture the first model that the code in a block calls, which need not be accessible outside of it.

    Args:
        path: As for `capture`.
        framework: The model's framework: `torch`, or `max`, of which it is the first model that a graph is
            made of.
        root: A glob for the class of the model, or one and `@N` for the N-th such model, from 0.
        options: Further arguments of `capture`, such as `progress`.

    Returns:
        A context manager that yields the models that are called.

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

        called.roots = stack.enter_context(adapter_named(framework).watch_roots(root, take))
        yield called
    if called.capture is None:
        names = ", ".join(root.name for root in called.roots)
        what = f"no model {root!r}" if root else f"no {framework} model with parameters"
        raise CaptureError(
            f"{what} was called in the block" + (f", but {names}" if names else ""),
            hint="What is called in other processes is not seen.",
        )


_OURS: Final = tuple(  # files whose frames a script's traceback does not show
    str(Path(__file__).parents[1].joinpath(*parts))
    for parts in (
        ("session", "program.py"),
        ("adapters", "torch", "roots.py"),
        ("adapters", "torch", "direct_calls.py"),
        ("adapters", "max", "roots.py"),
        ("adapters", "max", "foreign_program.py"),
        ("adapters", "max", "hooks.py"),
        ("adapters", "max", "trace.py"),
    )
)
_PATIENCE_SECONDS: Final = 10
_REPLACES_PROCESS: Final = ("execv", "execve")  # by which the others of their family are written


class ScriptRun:
    """A run of a script under capture.

    Attributes:
        script: The script.
        capture: The capture, which is over; None if no model was captured.
        error: The error that ended the script; None after its end or `sys.exit(0)`.
        trouble: The error of the capture, if it has one.
        status: The script's own exit status.
    """

    def __init__(
        self,
        script: Script,
        path: str | os.PathLike[str] | None,
        *,
        root: str | None = None,
        framework: str | None = None,
        ended: Callable[[ScriptRun], None] = lambda _: None,
        log: PlainLog | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """Prepare a run.

        Args:
            script: The script to run.
            path: As for `capture`.
            root: A glob for the class of the model to capture, or one and `@N` for the N-th such model;
                None for the first model that is called.
            framework: The framework whose models are looked for; all that are installed if None.
            ended: Is called when the script and its capture are over, also if the script ends the process
                at once.
            log: As for `capture`.
            progress: As for `capture`.
            options: Options of what is recorded, as for `capture`.
        """
        self.script = script
        self.capture: Capture | None = None
        self.error: BaseException | None = None
        self.trouble: TensorcapError | None = None
        self.status = 0
        self._path = None if path is None else Path(path).absolute()  # the script may go elsewhere
        self._root = root
        self._framework = framework
        self._roots: list[list[CalledRoot]] = []  # of each framework
        self._ended = ended
        self._log = log
        self._progress = progress
        self._unparsed_options = options
        self._description = script.describe()
        self._process = os.getpid()
        self._is_over = False
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._lock = threading.RLock()

    def run(self) -> ScriptRun:
        """Run the script to its end; an error that ends it is kept, not raised.

        Raises:
            UsageError: There is no such script, or it is no Python; an option cannot be read.
            WriteError: The archive could not be written there.
            MissingPackageError: The framework is not installed, or none is.
        """
        self._options = self._parse_options()
        with ExitStack() as stack:
            watches = {name: stack.enter_context(_on_import(name)) for name in self._frameworks()}
            main = stack.enter_context(as_main(self.script))
            for name, watch in watches.items():
                watch(functools.partial(self._look_out, name, stack))
            code = self._compile(main)
            for name in _REPLACES_PROCESS:
                stack.enter_context(replace_attribute(os, name, self._wrap_exec))
            stack.enter_context(replace_attribute(os, "_exit", self._wrap_exit))
            if code is not None:
                try:
                    exec(code, vars(main))
                except BaseException as error:
                    self._end_by(error)
            self._wait()
            self.finish()
        return self

    @property
    def roots(self) -> list[CalledRoot]:
        """The models that it called."""
        return [root for roots in self._roots for root in roots]

    @property
    def others(self) -> list[CalledRoot]:
        """The models that it called and that were not captured."""
        return [root for root in self.roots if root.calls and not root.is_taken]

    def finish(self) -> None:
        """Close the archive, once, and call `ended`."""
        with self._lock:
            if self._is_over or self._process != os.getpid():
                return
            self._is_over = True
            self._restore_streams()
            if self.capture is not None:
                self._description["also_called"] = {root.name: root.calls for root in self.others}
                error = self.error
                try:
                    self.capture.__exit__(type(error) if error else None, error, None)
                except TensorcapError as trouble:
                    self.trouble = trouble
            elif self.trouble is None and self.error is None:
                self.trouble = self._nothing_called()
        self._ended(self)

    def _parse_options(self) -> CaptureOptions:
        """Find what is wrong with the options whatever the model is, before the script has run for long."""
        options = CaptureOptions.parse(**self._unparsed_options)
        if options.level == "op" and not options.ops_in:
            # between its calls are ops of other models, and modes of the script
            options = replace(options, ops_in=("*",))
        if self._path is not None:
            rank = process_rank()
            path = self._path if rank is None else rank_path(self._path, rank.rank)
            Writer(path, container=options.container).abandon(discard=True)
        return options

    def _frameworks(self) -> tuple[str, ...]:
        """The frameworks whose models are looked for."""
        if self._framework is not None:
            return (self._framework,)
        return tuple(name for name in MODEL_MODULES if _is_installed(name)) or ("torch",)

    def _look_out(self, framework: str, stack: ExitStack) -> None:
        """Look for models of a framework, now that it is imported."""
        self._roots.append(stack.enter_context(adapter_named(framework).watch_roots(self._root, self._take)))

    def _take(self, model: Any) -> bool:
        """Put a model under capture; an error of ours ends the script, which would run in vain."""
        if self.capture is not None:
            return False  # one of another framework is
        try:
            started = Capture(
                model,
                self._path,
                self._options,
                log=self._log,
                run={"script": self._description},
                progress=self._progress,
                warns=False,
            )
            started.__enter__()
        except TensorcapError as trouble:
            self.trouble = trouble
            raise _Stopped from trouble
        self.capture = started
        return True

    def _compile(self, main: ModuleType) -> CodeType | None:
        """Compile the code to run; None if a package that is imported before it fails."""
        try:
            return compile_script(self.script, main)
        except TensorcapError:
            raise
        except BaseException as error:
            self._end_by(error)
            return None

    def _end_by(self, error: BaseException) -> None:
        """Keep the error that ended the script, and show it as Python would."""
        if isinstance(error, _Stopped):
            return
        if isinstance(error, SystemExit):
            code = error.code
            self.status = code if isinstance(code, int) else int(code is not None)
            self.error = error if self.status else None
            if code is not None and not isinstance(code, int):
                sys.stderr.write(f"{code}\n")
            return
        self.error, self.status = error, 1
        _strip_frames(error)
        if not isinstance(error, KeyboardInterrupt):
            sys.excepthook(type(error), error, error.__traceback__)

    def _wait(self) -> None:
        """Wait for the threads that Python would wait for at its end."""
        try:
            for thread in filter(_is_waited_for, threading.enumerate()):
                thread.join(_PATIENCE_SECONDS)
                if thread.is_alive():
                    self._streams["stderr"].write(f"tensorcap: waiting for the thread {thread.name}\n")
                    thread.join()
        except KeyboardInterrupt as error:
            self._end_by(error)

    def _restore_streams(self) -> None:
        """Restore the standard streams, and open anew those that the script has closed."""
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = self._streams[name]
            if stream.closed:
                stream = _open_stream(number)
            setattr(sys, name, stream)

    def _wrap_exit(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def _exit(status: int) -> None:
            if os.getpid() == self._process:
                self.status = status
                self.error = SystemExit(status) if status else None
                self.finish()
            original(status)

        return _exit

    def _wrap_exec(self, original: Callable[..., None]) -> Callable[..., None]:
        def exec_(*args: Any) -> None:
            if os.getpid() == self._process:
                self.finish()
            original(*args)

        return exec_

    def _nothing_called(self) -> CaptureError:
        where = self.script.target
        called = calls_text(self.roots)
        if self._root is not None and self.roots:
            return CaptureError(
                f"{where}: no model {abbreviate(self._root)!r} was called, but {called}",
                hint=did_you_mean(self._root, [root.name for root in self.roots]),
            )
        if self.roots:
            return CaptureError(
                f"{where}: called no model that has parameters and is not scripted, but {called}",
                hint=f"If that is the model: --root {self.roots[0].name}",
            )
        of_framework = "" if self._framework is None else f"{self._framework} "
        return CaptureError(
            f"{where}: called no {of_framework}model in this process",
            hint="What it runs in other processes is not seen.",
        )


class _Stopped(SystemExit):
    """Ends the script as `SystemExit` does, which is no error of its own; a thread ends by it silently."""


def calls_text(roots: Sequence[CalledRoot]) -> str:
    """Models and how often they were called, as a text.

    Example:
        >>> calls_text([CalledRoot("Draft", 12), CalledRoot("Softmax", 1)])
        'Draft (12 calls), Softmax (1 call)'
    """
    return some([f"{root.name} ({counted(root.calls, 'call')})" for root in roots], 8)


@contextmanager
def _on_import(framework: str) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Call a function as soon as a framework is imported, without importing it sooner.

    Yields:
        A function that takes the function to call.

    Raises:
        MissingPackageError: The framework is not installed.
    """
    if not _is_installed(framework):
        raise missing_package("capturing a script", framework, extra=framework)
    module = MODEL_MODULES[framework]
    finder = _ImportHook(module)

    def call_on_import(then: Callable[[], None]) -> None:
        if module in sys.modules:
            then()
        else:
            finder.then = then
            sys.meta_path.insert(0, finder)

    try:
        yield call_on_import
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def _is_installed(framework: str) -> bool:
    return framework in sys.modules or importlib.util.find_spec(framework) is not None


class _ImportHook:
    """A finder of modules that waits for one module, which another finder finds."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.then: Callable[[], None] = lambda: None

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.then()

            loader.exec_module = exec_module
        return spec  # it may only be asked whether there is such a package


def _is_waited_for(thread: threading.Thread) -> bool:
    """Whether the thread has to end before the archive is finished; those of pools end with the process."""
    if thread.daemon or thread is threading.current_thread():
        return False
    pools = sys.modules.get("concurrent.futures.thread")
    is_pooled = thread in getattr(pools, "_threads_queues", ())
    return not is_pooled and type(thread).__module__ != "concurrent.futures.process"


def _open_stream(number: int) -> TextIO:
    """Open a stream for a file descriptor, or for the null device if there is no such file."""
    try:
        return open(number, "w", encoding="utf-8", closefd=False)
    except OSError:
        return open(os.devnull, "w", encoding="utf-8")


def _strip_frames(error: BaseException) -> None:
    """Take our own frames out of the tracebacks of an error and of its causes."""
    visited: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is not None and id(current) not in visited:
            visited.add(id(current))
            current.__traceback__ = _without_ours(current.__traceback__)
            pending += [current.__cause__, current.__context__]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None:
        if trace.tb_frame.f_code.co_filename not in _OURS:
            frames.append(trace)
        trace = trace.tb_next
    stripped: TracebackType | None = None
    for frame in reversed(frames):
        stripped = TracebackType(stripped, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return stripped
