"""Counts, lists and foreign text in sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

_NUMBER: Final = re.compile(r"(?<![^./])\d+(?![^./])")  # a whole part of a name
_OF_ONE: Final = {"are": "is", "were": "was", "have": "has", "do": "does"}  # verbs
WIDEST_NAME: Final = 160  # characters: the middle of a longer name is left out
FEW: Final = 3  # items of a list that are named; the others are counted


def some(names: Sequence[str], few: int = FEW) -> str:
    """Join the first few of some names, and say how many more there are.

    Example:
        >>> some(["a", "b"]), some(["a", "b", "c", "d", "e"])
        ('a, b', 'a, b, c, and 2 more')
    """
    more = f", and {len(names) - few} more" if len(names) > few else ""
    return ", ".join(names[:few]) + more


def counted(count: int, noun: str, verb: str = "") -> str:
    """A count with its noun, and the verb that agrees with it.

    Args:
        count: How many.
        noun: Of one.
        verb: Of several; "" without.

    Example:
        >>> counted(1, "tensor"), counted(2, "tensor"), counted(1, "row", "are"), counted(2, "row", "are")
        ('1 tensor', '2 tensors', '1 row is', '2 rows are')
    """
    text = f"{count} {noun}" if count == 1 else f"{count} {noun}s"
    return f"{text} {conjugated(count, verb)}" if verb else text


def conjugated(count: int, verb: str) -> str:
    """A verb as it follows a count.

    Args:
        count: How many do or are so.
        verb: Of several.

    Example:
        >>> conjugated(1, "differ"), conjugated(1, "were"), conjugated(3, "were")
        ('differs', 'was', 'were')
    """
    return verb if count != 1 else _OF_ONE.get(verb, f"{verb}s")


def name_pattern(name: str, *, last: bool = False) -> str:
    """A name with `{}` for each part that is a number, or for the last of them alone.

    Example:
        >>> name_pattern("0/model.layers.11.mlp/param.weight")
        '{}/model.layers.{}.mlp/param.weight'
    """
    if not last:
        return _NUMBER.sub("{}", name)
    for match in reversed([*_NUMBER.finditer(name)][-1:]):
        name = f"{name[: match.start()]}{{}}{name[match.end() :]}"
    return name


def name_numbers(name: str) -> list[int]:
    """The numbers that are whole parts of a name.

    Example:
        >>> name_numbers("0/model.layers.11.fc1/param.weight")
        [0, 11]
    """
    return [int(number) for number in _NUMBER.findall(name)]


def is_product(names: Sequence[str]) -> bool:
    """Whether names of one pattern are all that its numbers can be put together to."""
    return math.prod(map(len, _places(names))) == len(names)


def joined_name(names: Sequence[str]) -> str:
    """One name for names of one pattern, with the numbers of each place that differ.

    Example:
        >>> joined_name([f"model.layers.{number}.mlp" for number in (0, 1, 2, 5)])
        'model.layers.{0-2,5}.mlp'
    """
    return _joined_name(names[0], _places(names)) if len(names) > 1 else names[0]


def product_name(names: Sequence[str]) -> str | None:
    """`joined_name`; None if the names are not all that its numbers can be put together to.

    Example:
        >>> product_name(["a.0.b.0", "a.0.b.1"]), product_name(["a.0.b.0", "a.1.b.1"])
        ('a.0.b.{0-1}', None)
    """
    places = _places(names)
    return _joined_name(names[0], places) if math.prod(map(len, places)) == len(names) else None


def _joined_name(name: str, places: Iterable[Sequence[int]]) -> str:
    texts = iter(str(n[0]) if len(n) == 1 else f"{{{_ranges(n)}}}" for n in places)
    return _NUMBER.sub(lambda _: next(texts), name)


def _places(names: Sequence[str]) -> list[list[int]]:
    """The numbers at each place of names of one pattern."""
    texts = zip(*map(_NUMBER.findall, names), strict=True)  # most occur many times: as numbers once
    return [sorted(set(map(int, set(column)))) for column in texts]


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def one_line(text: str) -> str:
    r"""Text of a file, for a terminal: in one line, and without what a terminal would obey.

    Example:
        >>> one_line("out of\n  memory\x1b[2J")
        'out of memory [2J'
    """
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def fault_text(error: Exception) -> str:
    """A fault in our own code, for a reader who may report it.

    Example:
        >>> fault_text(IndexError("list index out of range"))
        'a fault of tensorcap, please report it (IndexError: list index out of range)'
    """
    return f"a fault of tensorcap, please report it ({one_line(f'{type(error).__name__}: {error}')})"


def printable(line: str) -> str:
    r"""A line with `?` for each character that a terminal would obey; its spaces stay.

    Example:
        >>> printable("a  b\x1b[2J")
        'a  b?[2J'
    """
    return "".join(c if c.isprintable() else "?" for c in line)


def shortened(name: str, limit: int = WIDEST_NAME) -> str:
    """A name of at most so many characters, without its middle.

    Example:
        >>> shortened("model.layers.0.mlp", 12)
        'model…0.mlp'
    """
    half = (limit - 1) // 2
    return name if len(name) <= limit else f"{name[:half]}…{name[-half:]}"


def three_digits(value: float | None) -> str:
    """A number in three digits, "" for none.

    Example:
        >>> three_digits(0.0810523), three_digits(float("inf")), three_digits(None)
        ('0.0811', 'not finite', '')
    """
    if value is None:
        return ""
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def number_and_limit(value: float, limit: float, digits: int = 2) -> tuple[str, str]:
    """Write a number and its limit with as many digits as tell them apart, at least some.

    Example:
        >>> number_and_limit(1.04e-5, 1e-5), number_and_limit(0.5, 1e-5), number_and_limit(1.0, 1.0)
        (('1.04e-05', '1e-05'), ('0.5', '1e-05'), ('1', '1'))
    """
    for count in range(digits, 18):
        texts = f"{value:.{count}g}", f"{limit:.{count}g}"
        if texts[0] != texts[1]:
            return texts
    return f"{value:.{digits}g}", f"{limit:.{digits}g}"
