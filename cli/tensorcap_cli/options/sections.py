"""Help texts in sections: a command's own options before those of a run, commands by what they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])
_OWN: Final = "Options"


class RunOption(click.Option):
    """An option that says what is run: it stands behind the command's own options."""

    section = "Run options"


run_option: Final = partial(click.option, cls=RunOption)


def with_options(*options: Callable[[_Function], _Function]) -> Callable[[_Function], _Function]:
    """Give a command several options, in this order."""

    def decorate(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


class Command(click.Command):
    """A command whose options stand in sections, the command's own first.

    A path that this user may not read is no wrong usage: who opens it says so, with exit status 3.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for parameter in self.params:
            if isinstance(parameter.type, click.Path):
                parameter.type.readable = False

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each kind of option."""
        sections: dict[str, list[tuple[str, str]]] = {_OWN: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "section", _OWN), []).append(record)
        sections = {_OWN: sections.pop(_OWN), **sections}
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class Group(click.Group):
    """A group that lists its commands in sections.

    Attributes:
        sections: The names of its commands by the title of their section.
    """

    sections: ClassVar[Mapping[str, Sequence[str]]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the names of all commands, section by section."""
        return [name for names in self.sections.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each kind of command."""
        width = max(map(len, self.list_commands(ctx)))
        for title, names in self.sections.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            limit = formatter.width - 6 - width
            with formatter.section(title):
                formatter.write_dl(
                    [(name.ljust(width), c.get_short_help_str(limit)) for name, c in commands if c]
                )
