"""What a query of the page asks for: rows, a plane, a module, a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from starlette.exceptions import HTTPException

from tensorcap.viewer.inspector import Inspection
from tensorcap.viewer.planes import PlaneView
from tensorcap.viewer.rows import METRICS, Choice

_LONGEST: Final = 4096  # characters of a text to be looked for
_DIGITS: Final = 20  # of a number


def choice_of(query: Mapping[str, str]) -> Choice:
    """What a reader wants to see, as a query has it."""
    metric = query.get("metric", "psnr")
    return Choice(
        query.get("sort", "similarity"),
        metric if metric in METRICS else "psnr",
        query.get("text", "")[:_LONGEST],
        query.get("status", ""),
        query.get("component", ""),
        unquoted(query.get("under", "")),
        "once" in query,
    )


def view_of(query: Mapping[str, str], inspection: Inspection) -> PlaneView:
    """The view that a query describes; what it leaves out is chosen.

    Raises:
        HTTPException: It has no numbers where they have to be.
    """
    ndim = max(2, len(inspection.shape))
    at = tuple(whole_number(query.get(f"at{axis}", "0")) for axis in range(ndim))
    box = [whole_number(part) for part in query.get("box", "").split(",")[:4] if part]
    rows, columns = (whole_number(query[name]) if name in query else None for name in ("rows", "columns"))
    view = PlaneView.of(inspection.shape, rows, columns, at, box if len(box) == 4 else None)
    if "worst" in query and inspection.worst_index is not None:
        return view.showing(inspection.worst_index)
    return view


def quoted(path: str) -> str:
    """The path of a module as an attribute of HTML can hold it, whatever is in it."""
    return quote(path, safe="", errors="surrogatepass")


def unquoted(text: str) -> str:
    """The path that `quoted` made an attribute of."""
    return unquote(text, errors="surrogatepass")


def whole_number(text: str) -> int:
    """A whole number.

    Raises:
        HTTPException: It is none.
    """
    try:
        return int(text[:_DIGITS])
    except ValueError as error:
        raise HTTPException(400, f"{text[:_DIGITS]!r} is no number") from error


def real_number(text: str) -> float:
    """A number, 0 for NaN.

    Raises:
        HTTPException: It is none.
    """
    try:
        value = float(text[:_DIGITS])
    except ValueError as error:
        raise HTTPException(400, f"{text[:_DIGITS]!r} is no number") from error
    return value if value == value else 0.0
