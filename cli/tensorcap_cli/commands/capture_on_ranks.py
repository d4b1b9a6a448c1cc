"""`tcap capture … --tp N`: the same command in a process for each rank, and their archives merged."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from tensorcap_cli.options.sections import Command

_ARGUMENTS: Final = "tensorcap_cli.arguments"
_TIME_LIMIT: Final = "--timeout"


class RanksCommand(Command):
    """A command that can start itself again, and so keeps its arguments as they were."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments, and keep them."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


def ranks_to_start(count: int) -> int:
    """How many processes to start: none, which is 1, if this is a rank that a launcher started.

    Args:
        count: How many ranks are wanted.

    Raises:
        UsageError: This is a rank of another count.
    """
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched == "1" or "RANK" not in os.environ:
        return count
    if count > 1 and launched != str(count):
        raise click.UsageError(f"--tp {count}: a launcher started {launched} ranks, expected as many.")
    return 1


def _without_time_limit(arguments: Sequence[str]) -> list[str]:
    """Arguments without `--timeout`, which is that of this process: it ends the ranks."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == _TIME_LIMIT:
            next(words, None)
        elif not word.startswith(f"{_TIME_LIMIT}="):
            kept.append(word)
    return kept


def capture_on_ranks(count: int, options: Mapping[str, Any], *, as_json: bool) -> None:
    """Run the command of the current context on several ranks, merge what they wrote, and print that.

    Args:
        count: How many ranks.
        options: Its options.
        as_json: Whether the outcome is printed as JSON.

    Raises:
        UsageError: An option is not for several ranks.
        CaptureError: A process died.
    """
    from tensorcap.session import run_on_ranks
    from tensorcap_cli.commands.merge import print_merged
    from tensorcap_cli.text.output import print_result
    from tensorcap_formats.merge import merge
    from tensorcap_formats.ranks import rank_path

    if options["output"] is None:
        raise click.UsageError("--tp: each rank writes an archive, expected -o ARCHIVE and no --dry-run.")
    if options["log_form"] is not None:
        raise click.UsageError("--tp: several processes print at once, expected no --print.")
    context = click.get_current_context()
    output = Path(options["output"])
    paths = [rank_path(output, rank) for rank in range(count)]
    own = [*context.command_path.split()[1:], *_without_time_limit(context.meta[_ARGUMENTS])]
    click.echo(f"capturing {count} ranks, a process each", err=True)
    command = [sys.executable, "-m", "tensorcap_cli", *own]
    run_on_ranks(command, [path.with_suffix(".log") for path in paths], paths)
    print_result(merge(paths, output), print_merged, as_json=as_json)
