"""Suspects, and what stands around them, as lines of text: for the terminal and for `summary.txt`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tensorcap.comparison import label_of
from tensorcap.localization import ChangePoint, Localization, NonfiniteOrigin, Operation, Suspect, line_text
from tensorcap.wording import FEW, counted, some

_SEEN: Final = 1e-6  # of a median row: below it few rows make a change, none of which is the usual one
_WRONG: Final = ("suspect", "diverged")


def suspect_lines(number: int, suspect: Suspect, *, show_all: bool = False) -> list[str]:
    """Describe a suspect in a few lines.

    1. Its place and name, with the numbers of all layers that have the same explanation.
    2. Its errors: its own, the inherited one, the total one, that from run to run, and R, as far as known.
    3. Which evidence speaks against it, and why.
    4. What explains its values, and those of other layers where that is something else, and what that mistake
       usually is; or that no hypothesis does, and how many were tried if that were not all.
    5. In which operations its code differs, with their lines, if both models ran.
    6. Its root cause, if that is something else.

    Args:
        number: Its place, from 1.
        suspect: The suspect.
        show_all: Whether each of those layers is listed with its own error.

    Returns:
        The heading, and at least two lines below it.
    """
    name = suspect.class_name.rpartition(".")[2]
    lines = [f"{number}. {suspect.name} ({name})" if name else f"{number}. {suspect.name}"]
    if suspect.operation is not None:
        lines += _operation_lines(suspect.operation)
    lines.append(f"{_errors(suspect)} (at {suspect.key})")
    lines.append(f"by {' and '.join(suspect.by)}: {suspect.reason}")
    mistake, examined = suspect.diagnosis, suspect.examined
    if mistake is not None:
        lines.append(f"explained: {mistake.text} (leaves {mistake.after:.2g})")
        others = suspect.other_mistakes
        shown = others if show_all else others[:FEW]
        lines += [f"of {module}: {one.text} (leaves {one.after:.2g})" for module, one in shown]
        if len(shown) < len(others):
            left = counted(len(others) - len(shown), "more module", "are")
            lines.append(f"{left} explained otherwise; tcap localize --all says how")
        if suspect.schedule or mistake.hint:
            lines.append(suspect.schedule or mistake.hint)
    elif examined is not None and (examined.status == "unexplained" or suspect.tried < suspect.possible):
        lines.append(f"no hypothesis explains its values{_bound_text(suspect)}")
    if suspect.code is not None:
        lines.append(suspect.code.text)
    if suspect.cause and (mistake is None or suspect.cause != mistake.kind):
        is_by_size = suspect.ratio is not None and suspect.cause == label_of(suspect.ratio)
        lines.append(f"{'an R of that size usually means' if is_by_size else 'root cause'}: {suspect.cause}")
    if show_all:
        lines += [f"also {other.module}: {_errors(other)} (at {other.key})" for other in suspect.others]
    return lines


def _bound_text(suspect: Suspect) -> str:
    """How much of the search for a cause was made, if it ended at its bound."""
    if suspect.tried >= suspect.possible:
        return ""
    return (
        f": {suspect.tried:,} of {suspect.possible:,} possible causes were tried; "
        "tcap localize --exhaustive tries all"
    )


def _operation_lines(operation: Operation) -> Iterator[str]:
    """What a compiled target's suspect runs on both sides, and what else it may be."""
    place = operation.place
    target = "has none"
    if operation.target_op or operation.target_node:
        number = "" if operation.target_op_id is None else f" #{operation.target_op_id}"
        target = f"{operation.target_op}{number}".strip() or operation.target_node
        if operation.target_node not in ("", place.node):
            target += f" of {operation.target_node}"
        target += line_text(operation.target_file, operation.target_line)
    yield f"{place.op}{place.line_text} in the reference; in the target {target}"
    if operation.between:
        names = [f"{one.module}:{one.node} ({one.op}{one.line_text})" for one in operation.between]
        yield f"or what comes before it and has no value in the target: {some(names)}"


def _errors(suspect: Suspect) -> str:
    """The errors of a suspect that are known; its status if none is.

    They are those of the usual row, the median, which is said if that one is right.
    """
    numbers = {
        "own": suspect.own,
        "inherited": suspect.inherited,
        "total": suspect.total,
        "from run to run": suspect.noise,
    }
    texts = [f"{what} {value:.3g}" for what, value in numbers.items() if value is not None]
    if suspect.ratio is not None:
        texts.append(f"R {suspect.ratio:.3g}")
    what = "error of the usual row" if texts and _errs_in_few_rows(suspect) else "error"
    return f"{what}: {', '.join(texts) or suspect.status}"


def _errs_in_few_rows(suspect: Suspect) -> bool:
    """Whether the usual row is right, and the worst ones or one element speak against a suspect."""
    of_rows = [f.status in _WRONG for f in suspect.findings if f.test.startswith("own_error")]
    wrong = {finding.test for finding in suspect.findings if finding.status in _WRONG}
    is_of_rows = bool(of_rows) and not of_rows[0] and any(of_rows)
    return is_of_rows or (wrong == {"outlier_element"} and not any(of_rows))


def context_lines(localization: Localization) -> Iterator[str]:
    """Describe what stands around suspects: composites, the origin of non-finite values, error curves."""
    if localization.explained:
        modules = [f"{module} by {child}" for module, child in localization.explained]
        yield f"Explained by what is within: {some(modules)}."
    if localization.undone:
        modules = [f"{one.module} ({one.reason})" for one in localization.undone]
        yield f"No mistake: {some(modules, 2)}."
    if localization.nonfinite is not None:
        yield _nonfinite_text(localization.nonfinite)
    yield from _change_texts(localization.changes)


def _nonfinite_text(origin: NonfiniteOrigin) -> str:
    """Where values stop being finite, and what went in, as a sentence."""
    tensor = origin.tensor
    bad = [operand.key for operand in origin.operands if not operand.is_finite]
    largest = max((operand.largest or 0.0 for operand in origin.operands), default=0.0)
    count = counted(len(origin.operands), "operand")
    if not origin.operands:
        operands = "what went into it was not captured"
    elif bad:
        operands = f"of {count} not finite: {some(bad)}"
    else:
        by_size = sorted(origin.operands, key=lambda operand: -(operand.largest or 0.0))
        keys = some([operand.key for operand in by_size])
        first = ", the largest first" * (len(by_size) > 1)
        every = "all " * (len(by_size) > 1)
        operands = f"its {count} {every}finite, up to {largest:.3g}{first}: {keys}"
    return (
        f"Values stop being finite at {origin.key}, made by {origin.module}: of {tensor.elements} elements "
        f"{tensor.nan} are NaN and {tensor.inf} infinite; {operands}."
    )


def _change_texts(changes: Sequence[ChangePoint]) -> Iterator[str]:
    """Where each curve changes, the earliest step first, a sentence for each of the first few."""
    for curve in dict.fromkeys(change.curve for change in changes):
        of_curve = [change for change in changes if change.curve == curve]
        texts = "; ".join(map(_change_text, of_curve[:FEW]))
        more = f"; and {len(of_curve) - FEW} more" if len(of_curve) > FEW else ""
        yield f"{curve.capitalize()} error in execution order: {texts}{more}."


def _change_text(change: ChangePoint) -> str:
    before = f" on top of {change.before:.2g}" if change.before else ""
    results = counted(change.length, "result")
    is_all = change.curve == "total" and change.kind == "step"
    how = f"{results} wrong from there on" if is_all else f"{results} long"
    value = f"to {change.value:.2g}{before}" if change.value > _SEEN else "in few rows"
    return f"a {change.kind} at {change.key} {value}, {how}"
