"""The option that names sources of NxD Inference, for every command that loads a user's file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tensorcap_cli.options.sections import run_option

_Function = TypeVar("_Function", bound=Callable[..., Any])


def neuron_sources_option(function: _Function) -> _Function:
    """Give a command `--neuron-src`: files that it loads can import the sources.

    What an import says that fails in them is a sentence of where, what was expected and what to do.
    """

    @run_option(
        "--neuron-src",
        metavar="DIR",
        multiple=True,
        help="Where sources of NxD Inference lie; without a Neuron runtime stand-ins are imported for it.",
    )
    @functools.wraps(function)
    def command(*args: Any, neuron_src: tuple[str, ...], **kwargs: Any) -> Any:
        if neuron_src:
            from tensorcap.adapters.neuron import use_neuron_sources

            if remark := use_neuron_sources(neuron_src):
                click.echo(f"--neuron-src: {remark}", err=True)
        try:
            return function(*args, **kwargs)
        except ImportError as error:
            from tensorcap_formats.errors import TensorcapError

            if isinstance(error, TensorcapError):
                raise
            from tensorcap.adapters.neuron import explain_import_error

            explained = explain_import_error(error)
            if explained is None:
                raise
            raise explained from error

    return command  # type: ignore[return-value] # it takes what the function takes
