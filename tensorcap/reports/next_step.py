"""What to type next after a judgement, for this very case: one command, or that nothing has to be done.

The command takes the archives that are there. It never repeats the command that made the target: a run that
is wrong is not made right by making it again.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tensorcap.comparison import Comparison, Pair
from tensorcap.localization import joined_modules
from tensorcap.wording import one_line, shortened
from tensorcap_formats.keys import Key, module_of

if TYPE_CHECKING:
    from tensorcap.diagnosis import Diagnosis
    from tensorcap.localization import Localization, Verification

NOTHING: Final = "nothing has to be done"
_MAP: Final = "map.toml"
_TAKING: Final[Mapping[str, Sequence[str]]] = {  # which commands take an option
    "compute_dtype": ("compare", "diagnose", "localize"),
    "reference_model": ("localize",),
    "target_model": ("localize",),
}


@dataclass(frozen=True, slots=True)
class NextStep:
    """What to do next.

    Attributes:
        text: What for, without a stop at its end; "" if the reader knows.
        command: What to type; "" if nothing is to be typed.
    """

    text: str
    command: str = ""

    @property
    def line(self) -> str:
        """Both as the last line of a command's text.

        Example:
            >>> NextStep("which module is wrong", "tcap localize ref.h5 tgt.h5").line
            'Next, which module is wrong: tcap localize ref.h5 tgt.h5'
        """
        if not self.command or not self.text:
            return f"Next: {one_line(self.command or f'{self.text}.')}"
        return f"Next, {one_line(self.text)}: {one_line(self.command)}"


@dataclass(frozen=True, slots=True)
class Sides:
    """Both sides of a judgement, as a command names them.

    Attributes:
        reference: Path of the trusted archive.
        target: Path of the archive under test; "" if only its model is at hand.
        mapping: The map file, "" for none.
        options: Options of the command that judged, by their Python names, for those that take them too; a
            value of None is left out.
        is_compiled: Whether the target is a program compiled from a graph.
        has_recipe: Whether the reference says how its run is repeated.
        target_recipe: How the target's model is named by what its archive says of its run, "" if unknown.
        reference_recipe: The same of the reference's, where operations of both can be traced; else "".
    """

    reference: str
    target: str = ""
    mapping: str = ""
    options: Mapping[str, str | None] | None = None
    is_compiled: bool = False
    has_recipe: bool = False
    target_recipe: str = ""
    reference_recipe: str = ""

    def command(self, verb: str, *further: str) -> str:
        """A command of tcap on both sides, quoted for a shell."""
        words = ["tcap", verb, self.reference, *filter(None, [self.target]), *further]
        if self.mapping:
            words += ["--map", self.mapping]
        for name, value in (self.options or {}).items():
            if value is not None and verb in _TAKING[name]:
                words += [f"--{name.replace('_', '-')}", value]
        return shlex.join(words)


def after_comparison(comparison: Comparison, sides: Sides) -> NextStep:
    """The step after a comparison of archives, or of two of their records."""
    first = comparison.divergence
    if comparison.exit_status == 3:
        return _after_unreadable(comparison, sides)
    if comparison.exit_status == 0:
        return _after_green(comparison, sides)
    if not comparison.is_of_archives:
        return _after_records(comparison, sides)
    if not comparison.compared:
        return _after_nothing(comparison, sides)
    for side, name in ((sides.reference, comparison.reference), (sides.target, comparison.target)):
        if first is None and not name.is_complete:
            return NextStep("why the run ended early", f"tcap show {shlex.quote(side)}")
    if first is not None and first.is_run_input:
        return NextStep("all that differs before any tensor does", sides.command("preflight"))
    bad = first.pair if first is not None else _first_bad(comparison)
    if bad is not None and bad.status == "unjudged":
        return NextStep("with the error that you allow for R", f"{sides.command('compare')} --rtol R")
    if sides.is_compiled:
        return NextStep("which operations fail", sides.command("sync-points"))
    if first is not None:
        return _localize(sides)
    if comparison.absent:
        return NextStep("what has no counterpart, and why", sides.command("align"))
    if bad is not None:
        return NextStep("how this tensor was judged", sides.command("compare", "--why", bad.key))
    return _localize(sides)


def _localize(sides: Sides) -> NextStep:
    """Localize by the model that is known: the reference's, else the target's, else by archives alone."""
    model = ("--target-model", sides.target_recipe) if sides.target_recipe and not sides.has_recipe else ()
    return NextStep("which module is wrong", sides.command("localize", *model))


def _first_bad(comparison: Comparison) -> Pair | None:
    return next((pair for pair in comparison.pairs if pair.is_required and not pair.is_green), None)


def _after_unreadable(comparison: Comparison, sides: Sides) -> NextStep:
    """The side that cannot be read is the one whose name the reason begins with, else the target."""
    bad = next(pair for pair in comparison.pairs if pair.status == "unreadable")
    path = str(comparison.reference.path)
    side = sides.reference if bad.reason.startswith(("reference", path)) else sides.target
    return NextStep("what is damaged", f"tcap check {shlex.quote(side)}")


def _after_nothing(comparison: Comparison, sides: Sides) -> NextStep:
    """Pair tensors of other names, if both sides have some; else look at what the target has."""
    has_ours = any(
        p.reference is not None and p.target is None and p.status != "excluded" for p in comparison.pairs
    )
    has_theirs = any(p.reference is None and p.target is not None for p in comparison.pairs)
    if not (has_ours and has_theirs):
        return NextStep("what the target holds", f"tcap ls {shlex.quote(sides.target)}")
    if sides.mapping:
        return NextStep("what the map pairs", sides.command("align"))
    what = "what belongs together though no names are equal, as a map to edit and to give to compare"
    return NextStep(what, sides.command("align", "-o", _MAP))


def _after_green(comparison: Comparison, sides: Sides) -> NextStep:
    """Of values that are within rounding a twin of the target's precision proves more, if one can be made."""
    commands = comparison.account.commands if comparison.account else ()
    if commands and comparison.counts.get("within-rounding"):
        return NextStep("what would prove more", f"{commands[0]} && {commands[1]}")
    if comparison.account is not None and comparison.account.has_estimates:
        return NextStep(
            "capture both runs with --params, which bounds what each layer with weights in few bits rounds"
        )
    return NextStep(NOTHING)


def _after_records(comparison: Comparison, sides: Sides) -> NextStep:
    (pair,) = comparison.pairs
    if pair.reference is None or pair.target is None or pair.difference is None:
        return NextStep("how the tensor was judged", sides.command("compare", "--why", pair.key))
    ours, theirs = pair.reference.key.text, pair.target.key.text
    target = sides.target if theirs == ours else f"{sides.target}::{theirs}"
    words = ["tcap", "diagnose", sides.reference, target, ours]
    return NextStep("which mistake explains the values", shlex.join(words))


def after_suspects(
    suspects: Sequence[Mapping[str, Any]],
    by: str,
    sides: Sides,
    *,
    exit_status: int,
    first: str = "",
) -> NextStep:
    """The step after suspects were looked for.

    Args:
        suspects: As `tcap localize --json` has them, the first one first.
        by: What accuses them: `replay`, `injection` or `archives`; "" if nobody looked.
        sides: Both archives.
        exit_status: What the command that judged ended with.
        first: Key text of the first divergence of the free runs; "" if there is none, or it is not known.
    """
    if exit_status == 0:
        return NextStep(NOTHING)
    if not by:
        return NextStep("which module is wrong", sides.command("localize"))
    if suspects and suspects[0]["is_own"]:
        is_named = suspects[0]["diagnosis"] is not None or "code" in suspects[0]
        known = sides.options or {}
        is_traced = None not in (known.get("reference_model"), known.get("target_model"))
        if sides.reference_recipe and sides.target_recipe and not (is_named or is_traced):
            models = ("--reference-model", sides.reference_recipe, "--target-model", sides.target_recipe)
            rest = {name: text for name, text in known.items() if not name.endswith("_model")}
            command = replace(sides, options=rest).command("localize", *models)
            return NextStep("which operations either side alone runs, with their lines", command)
        name = shortened(joined_modules(suspects[0]["modules"]))
        what = f"all that was tried on the values of {name}"
        return NextStep(what, sides.command("diagnose", suspects[0]["key"], "--all"))
    if by == "archives":
        model = () if sides.has_recipe else ("--reference-model", "FILE.py:FUNCTION")
        what = "the reference's model on the target's values, which tells own from inherited errors"
        return NextStep(what, sides.command("localize", *model))
    if first:
        return NextStep("how the first tensor was judged", sides.command("compare", "--why", first))
    return NextStep("what is missing, or not green", sides.command("compare"))


def after_verification(verification: Verification) -> NextStep:
    """The step after a verification whose folder is in its place."""
    document = verification.to_json()
    paths = []
    for side in ("reference", "target"):
        path = verification.path / document[side]["path"]
        paths.append(str(path) if path.exists() else document[side]["path"])
    mapping = verification.path / _MAP
    sides = Sides(paths[0], paths[1], str(mapping) if mapping.is_file() else "", has_recipe=True)
    first = verification.free.divergence
    return after_suspects(
        document["suspects"],
        document["by"],
        sides,
        exit_status=verification.exit_status,
        first=first.pair.key if first else "",
    )


def after_localization(localization: Localization, sides: Sides) -> NextStep:
    """The step after a localization; `sides` has the models that it was made with as options.

    Without the target's archive, which a run of its model stood in for, both models are verified: this writes
    the archives that everything else takes.
    """
    options = sides.options or {}
    model = options.get("target_model")
    if localization.exit_status and not sides.target and model is not None:
        words = ["tcap", "verify", sides.reference, model, "-o", "report/"]
        words += ["--map", sides.mapping] if sides.mapping else []
        return NextStep("the same with archives, pictures and what was tried", shlex.join(words))
    if localization.settings:
        return NextStep(f"mend what is set otherwise: {localization.settings[0].removesuffix('.')}")
    if options.get("reference_model") == "none":
        sides = replace(sides, options={**options, "reference_model": None})
    return after_suspects(
        [suspect.to_json() for suspect in localization.suspects[:1]],
        localization.by,
        sides,
        exit_status=localization.exit_status,
    )


def after_errors(sides: Sides, *, is_bad: bool) -> NextStep:
    """The step after a bisection or a replay, which found errors or not."""
    step = NextStep("which module is wrong, and which mistake explains it", sides.command("localize"))
    return step if is_bad else NextStep(NOTHING)


def after_pipeline_errors(sides: Sequence[str], options: Sequence[str], *, is_bad: bool) -> NextStep:
    """The step after a bisection that made both sides itself, and kept no archive.

    Args:
        sides: The models, as `tcap verify` takes them.
        options: The words of the options that say what is run.
        is_bad: Whether there are errors.
    """
    command = shlex.join(["tcap", "verify", *sides, *options, "-o", "report"])
    return NextStep("which mistake explains it", command) if is_bad else NextStep(NOTHING)


def after_diagnosis(diagnosis: Diagnosis, sides: Sides) -> NextStep:
    """The step after a diagnosis of one pair: without an explanation the models may tell more."""
    if diagnosis.status == "identical":
        return NextStep(NOTHING)
    if diagnosis.explanations:
        return NextStep(f"look at {module_of(Key.parse(diagnosis.key).site)} in the port")
    return NextStep("what a run of the model tells besides", sides.command("localize"))
