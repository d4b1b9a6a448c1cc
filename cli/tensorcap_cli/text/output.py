"""How every command prints: tables, numbers, sizes, JSON. Nothing here loads numpy."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeVar

import click

from tensorcap.wording import one_line
from tensorcap_cli.text.terminal import whole_stdout

if TYPE_CHECKING:
    from tensorcap.reports.next_step import NextStep


class _Printable(Protocol):
    @property
    def exit_status(self) -> int: ...

    def to_json(self) -> dict[str, Any]: ...


_Result = TypeVar("_Result", bound=_Printable)

DASH: Final = "-"
_BATCH: Final = 1000  # rows of a table
_LEAST_FLEXIBLE: Final = 24  # columns that a key keeps, however narrow the terminal


def print_json(value: object) -> None:
    """Print one JSON object in one line; it holds no number that JSON has not."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    click.echo(_plain_json(text), file=whole_stdout())


def print_json_pieces(pieces: Iterable[str]) -> None:
    """Print one JSON object that comes in pieces, without ever holding all of it."""
    for piece in pieces:
        click.echo(_plain_json(piece), nl=False, file=whole_stdout())


def _plain_json(text: str) -> str:
    """JSON in which characters that a terminal obeys stand as escapes, as those below the space do anyway."""
    if text.isascii():
        return text.replace("\x7f", "\\u007f")
    return "".join(c if c.isprintable() or c in "\n\t" else json.dumps(c)[1:-1] for c in text)


def print_heading(text: str, fg: str | None = None) -> None:
    """Print an empty line and a heading."""
    click.echo()
    click.secho(text, fg=fg, bold=True)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, None if it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    flexible: int | Sequence[int] = 0,
    colors: Sequence[Sequence[str | None]] | None = None,
) -> None:
    """Print aligned columns.

    Args:
        headers: One for each column.
        rows: Texts, as many in each row as there are headers; they are gone through twice, and not kept.
        left: Columns that begin at the left; the others end at the right, as numbers do.
        flexible: The column that gives way, in the middle of its texts, on a terminal that is too narrow; of
            several the first one first.
        colors: The color of each cell of each row, used on a terminal only.
    """
    widths = list(map(len, headers))
    for batch in _batches(rows):
        columns = zip(*batch, strict=True)
        widths = [max(width, *map(len, cells)) for width, cells in zip(widths, columns, strict=True)]
    available = terminal_width()
    yielding = (flexible,) if isinstance(flexible, int) else tuple(flexible)
    for column in yielding if available is not None else ():
        excess = sum(widths) + 2 * (len(widths) - 1) - (available or 0)
        widths[column] -= max(0, min(excess, widths[column] - _LEAST_FLEXIBLE))

    def aligned(row: Sequence[str]) -> list[str]:
        return [
            (shorten(cell, width) if n in yielding else cell).ljust(width) if n in left else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]

    click.secho("  ".join(aligned(headers)).rstrip(), bold=True)
    colors_of_rows = iter(colors if colors is not None and available is not None else ())
    for batch in _batches(rows):
        lines = []
        for row in batch:
            cells = aligned(row)
            cells[-1] = cells[-1].rstrip()
            if color_of_cells := next(colors_of_rows, None):
                pairs = zip(cells, color_of_cells, strict=True)
                cells = [click.style(cell, fg=color) if color else cell for cell, color in pairs]
            lines.append("  ".join(cells).rstrip())
        click.echo("\n".join(lines))


def _batches(rows: Iterable[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
    """Rows, so many at a time that to print them all at once costs no memory, and batch by batch no time."""
    iterator = iter(rows)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


def shorten(text: str, width: int) -> str:
    """Cut the middle out of a text that is too wide.

    Example:
        >>> shorten("0/model.layers.12.self_attn.q_proj/output", 25)
        '0/model.laye…_proj/output'
    """
    if len(text) <= width:
        return text
    half = (width - 1) // 2
    return f"{text[: width - 1 - half]}…{text[len(text) - half :]}"


def class_text(name: str) -> str:
    """The name of a class without its module.

    Example:
        >>> class_text("transformers.models.llama.modeling_llama.LlamaMLP")
        'LlamaMLP'
    """
    return one_line(name).rpartition(".")[2]


def size_text(nbytes: int) -> str:
    """A size in bytes, for people.

    Example:
        >>> size_text(1000), size_text(4 << 20), size_text(0)
        ('1000 B', '4.0 MiB', '0 B')
    """
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def number_text(value: complex | None, digits: int = 4) -> str:
    """A number with few digits; whole numbers in full as long as they are short.

    Example:
        >>> number_text(0.000123456), number_text(70000), number_text(None), number_text(float("inf"))
        ('0.0001235', '70000', '-', 'inf')
    """
    if value is None:
        return DASH
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**9 else f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


def short_number(value: float) -> str:
    """A number with two digits and a short exponent, for the middle of a sentence.

    Example:
        >>> short_number(0.0808), short_number(1e-05), short_number(4)
        ('0.081', '1e-5', '4')
    """
    return number_text(value, 2).replace("e-0", "e-").replace("e+0", "e+")


def cosine_text(cosine: float | None) -> str:
    """A cosine in six places; 1 only if no more than the rounding of the sums is missing."""
    if cosine is None:
        return DASH
    return "1" if cosine > 1 - 1e-12 else f"{min(cosine, 0.999999):.6g}"


def upper_text(value: float | None, digits: int = 4) -> str:
    """A number rounded up, so that what is printed is enough."""
    if value is None or not value or math.isinf(value):
        return number_text(value)
    step = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    text = number_text(float(value), digits)
    return text if float(text) >= value else number_text(float(value) + step, digits)


def percent_text(share: float | None) -> str:
    """A share in percent; 0 and 100 only if it is nothing or all.

    Example:
        >>> percent_text(0.98437), percent_text(0.99999), percent_text(1.0), percent_text(None)
        ('98.4 %', '>99.9 %', '100 %', '-')
    """
    if share is None:
        return DASH
    if 0 < share < 0.001 or 0.999 < share < 1:
        return "<0.1 %" if share < 0.5 else ">99.9 %"
    return f"{100 * share:.3g} %"


def cut(text: str, limit: int) -> str:
    """Cut the end off a text that is too long.

    Example:
        >>> cut("another", 5)
        'anot…'
    """
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def option_text(name: str) -> str:
    """The option that a parameter of a command comes from.

    Example:
        >>> option_text("reference_repeat"), option_text("mapping")
        ('--reference-repeat', '--map')
    """
    return "--map" if name == "mapping" else f"--{name.replace('_', '-')}"


def option_words(options: Mapping[str, Any]) -> list[str]:
    """The words of those options of a command that were given.

    Example:
        >>> option_words({"prompt": "the sky", "seed": None, "config": ("a=1", "b=2"), "eager": True})
        ['--prompt', 'the sky', '--config', 'a=1', '--config', 'b=2', '--eager']
    """
    words = []
    for name, value in options.items():
        if value is True:
            words.append(option_text(name))
        elif value is not None and value is not False:
            values = value if isinstance(value, tuple) else (value,)
            words += [word for each in values for word in (option_text(name), str(each))]
    return words


def print_result(
    result: _Result,
    print_text: Callable[[_Result], None],
    *,
    as_json: bool,
    next_step: Callable[[_Result], NextStep] | None = None,
) -> NoReturn:
    """Print a result as text with what to type next, or as JSON, and end with its exit status."""
    if as_json:
        print_json(result.to_json())
    else:
        print_text(result)
        if next_step is not None:
            print_next(next_step(result))
    click.get_current_context().exit(result.exit_status)


def print_next(step: NextStep) -> None:
    """Print what to type next, as the last line of what a command says."""
    if not step.command:
        click.echo(step.line)
        return
    text = step.line.removesuffix(step.command).rstrip()
    width = terminal_width()
    is_long = width is not None and len(step.line) > width
    click.echo(text, nl=is_long)
    indent = "  " if is_long else " "
    click.echo(f"{indent}{click.style(step.command, bold=True)}", file=whole_stdout())  # whole, to be copied


def split_key(text: str) -> tuple[str, str | None]:
    """Part `ARCHIVE::KEY`; a path that exists is never parted.

    Example:
        >>> split_key("ref.h5::0/mlp/output"), split_key("ref.h5")
        (('ref.h5', '0/mlp/output'), ('ref.h5', None))
    """
    path, separator, key = text.partition("::")
    if not separator or os.path.exists(text):
        return text, None
    if not key:
        raise click.UsageError(f"{text!r} names no key behind `::`.")
    return path, key
