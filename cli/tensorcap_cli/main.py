"""The entry point of `tcap`, and the one place where errors become text and an exit status."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar, Final, TextIO, cast

import click

from tensorcap_cli.options.sections import Group
from tensorcap_cli.signals import EndedBySignal, exit_status_of, leave_unfinished_calls, signals_raised
from tensorcap_cli.text.progress import log_printed
from tensorcap_cli.text.terminal import Output, fit_stdout, harmless

_PRINTING: Final = ("click.utils", Output.__module__)
_MODULES: Final = {"import": "import_folder", "sync-points": "sync_points"}  # no names of modules


class _Tcap(Group):
    """Imports a command when it is called, so that `tcap --help` loads nothing of the library."""

    sections: ClassVar[Mapping[str, Sequence[str]]] = {
        "Capture": ("capture", "plan", "max"),
        "Look": ("ls", "show", "tree", "view"),
        "Compare": ("compare", "report", "sync-points", "align", "preflight", "divergence", "calibrate"),
        "Find the culprit": ("localize", "verify", "replay", "inject", "bisect", "diagnose", "sensitivity"),
        "Files": ("convert", "merge", "import", "export", "check", "recover", "equivalence"),
    }

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(f"tensorcap_cli.commands.{_MODULES.get(cmd_name, cmd_name)}")
        return cast("click.Command", module.command)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Parse the arguments, which prints the help if it is asked for."""
        try:
            return super().make_context(*args, **options)
        except OSError as error:
            if not _is_of_stdout(error):
                raise
            _report_unprinted(error)
            raise click.exceptions.Exit(1) from None

    def invoke(self, ctx: click.Context) -> Any:
        _open_missing_streams()
        fit_stdout()
        with warnings.catch_warnings(), log_printed(), signals_raised():
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                is_ours = isinstance(error, EndedBySignal)
                click.echo(f"Ended by {error}." if is_ours else "Interrupted.", err=True)
                _print_notes(error)
                leave_unfinished_calls(exit_status_of(error))
                ctx.exit(exit_status_of(error))
            except (click.exceptions.Exit, click.Abort):
                raise
            except click.ClickException as error:
                error.show(cast("TextIO", Output(sys.stderr)))
                ctx.exit(error.exit_code)
            except Exception as error:
                from tensorcap_formats.errors import TensorcapError

                if not isinstance(error, TensorcapError):
                    if not _is_of_stdout(error):
                        _show_frames_of_user()
                        raise
                    _report_unprinted(error)
                    ctx.exit(1)
                click.echo(f"Error: {error}", err=True)
                _print_notes(error)
                if error.hint:
                    click.echo(f"Hint: {error.hint}", err=True)
                ctx.exit(error.exit_status)


def _print_notes(error: BaseException) -> None:
    for note in getattr(error, "__notes__", ()):
        click.echo(harmless(note), err=True)


def _is_of_stdout(error: BaseException) -> bool:
    """Whether printing failed, other than by a pipe that nobody reads, which click ends quietly."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_printing = trace is not None and trace.tb_frame.f_globals.get("__name__") in _PRINTING
    return is_printing and isinstance(error, OSError) and not isinstance(error, BrokenPipeError)


def _report_unprinted(error: BaseException) -> None:
    sys.stdout = _devnull()  # what is left in the buffer would fail again at exit
    click.echo(f"Error: standard output: {error}", err=True)


def _show_frames_of_user() -> None:
    """Print an error that ends the process without the frames around the user's own."""
    if sys.excepthook is sys.__excepthook__:
        from tensorcap_cli.text.user_traceback import print_user_traceback

        sys.excepthook = print_user_traceback


def _devnull() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def _open_missing_streams() -> None:
    """Replace a stream that the caller has closed: the next file opened would get its number."""
    sys.stdout = sys.stdout or _devnull()
    sys.stderr = sys.stderr or _devnull()


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    from tensorcap_formats.errors import escaped

    click.echo(f"Warning: {escaped(str(message))}", err=True)


@click.group(cls=_Tcap, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(None, "-V", "--version", package_name="tensorcap", prog_name="tcap")
def main() -> None:
    """Find where a ported model parts from its reference.

    Capture both runs, then compare them:

    \b
        tcap capture torch MODEL -o ref.h5
        tcap capture torch --like ref.h5 --dtype bfloat16 -o tgt.h5
        tcap compare ref.h5 tgt.h5

    Archives are .h5, .zarr or .safetensors; files from elsewhere (checkpoints, .npz, .npy, folders of .npy
    or .pt, any HDF5 or zarr) are read as they are.

    Exit status: 0 done, and nothing to complain of; 1 differences found, or something failed; 2 wrong usage;
    3 an input cannot be read; 130 interrupted; 143 ended by SIGTERM, 129 by a closed terminal.
    """
