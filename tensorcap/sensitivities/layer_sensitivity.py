"""What each layer of a target costs of its output: measured by runs in which it alone is exchanged.

Two numbers of each layer or group: the output's loss if it alone is the target's, in a model that is the
reference's else, and if it alone is the reference's, in the target. Read `_Search.run`, which says which runs
are made.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tensorcap.adapters import Grafts, GraftSide, Layer, adapter_for
from tensorcap.rerun import RunLog
from tensorcap.sensitivities.output_metrics import Goal, OutputMetric, metric_of, parse_goal
from tensorcap.sensitivities.precision_lists import LISTS, precision_list
from tensorcap.wording import counted, one_line
from tensorcap_formats.errors import UsageError
from tensorcap_formats.json_values import json_value
from tensorcap_formats.progress import Progress, Silent

if TYPE_CHECKING:
    from tensorcap.workload import Workload
    from tensorcap_formats.dtypes import Array

Grouping = Literal["layer", "block", "class"]
GROUPINGS: Final[tuple[Grouping, ...]] = Grouping.__args__  # type: ignore[attr-defined] # no public name for it
_OUTLIER: Final = 4.0  # times the median of all layers, that one that stands out costs at least
_SHARE: Final = 0.05  # of the cost of all layers, the same
_SIGMAS: Final = 2.5  # times the spread of logarithms of costs, that it lies above their median
_NORMAL: Final = (
    1.4826  # times the median deviation is the spread, of normal ones (Rousseeuw and Croux, 1993)
)
_FEWEST: Final = 3  # groups, of which one may stand out
_BAD_BLOCK: Final = 2.0  # times the median of blocks, that a block costs whose layers are looked at
_FEW_BLOCKS: Final = 3  # fewer are all looked at
_LEFT: Final = 0.5  # of a goal, that blocks whose layers are not looked at may cost
_DIGITS: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """One layer, or several that are exchanged together.

    Attributes:
        name: Path of the layer or block; with `*` for numbers of a class.
        layers: Paths of its layers.
        alone: Loss of the output if it alone is the target's; None if that cannot run.
        kept: Loss if it alone is the reference's, in the target.
        cost: What ranks it: its loss alone; if that is not known, what keeping it takes off the target's.
        bytes_saved: Bytes of the reference's tensors less those of the target's.
        stands_out: Whether it costs far more than layers do in general.
        block: The block that it is of; "" if it is none's.
    """

    name: str
    layers: tuple[str, ...]
    alone: float | None
    kept: float
    cost: float
    bytes_saved: int
    stands_out: bool = False
    block: str = ""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What the layers of a target cost, and which have to stay in the reference's precision.

    Attributes:
        metric: Its name.
        metric_text: What its numbers are, in words.
        total: Loss of the target as it is.
        floor: Loss with all layers the reference's: what no layer costs.
        by: What was exchanged together.
        groups: The groups that were measured, the most costly first.
        blocks: Blocks of which only the whole was measured, the most costly first.
        runs: Runs of models, those that a file kept left out.
        known_runs: Runs whose result a file kept.
        layers: Count of layers that can be exchanged.
        left_out: Layers that cannot be, and why.
        goal: As it was given; "" without.
        keep: Layers that stay in the reference's precision for the goal; those that stand out without one.
        reached: Loss with these kept; None if that was not run.
        is_reached: Whether the goal is reached with them; None without a goal.
        bytes_kept: Bytes that they cost, over the target's.
    """

    metric: str
    metric_text: str
    total: float
    floor: float
    by: Grouping
    groups: tuple[LayerGroup, ...]
    blocks: tuple[LayerGroup, ...]
    runs: int
    known_runs: int
    layers: int
    left_out: Mapping[str, str]
    goal: str = ""
    keep: tuple[str, ...] = ()
    reached: float | None = None
    is_reached: bool | None = None
    bytes_kept: int = 0

    @property
    def exit_status(self) -> int:
        """1 if a goal is not reached with all layers kept, else 0 (SEN-10)."""
        return 1 if self.is_reached is False else 0

    @property
    def outliers(self) -> tuple[LayerGroup, ...]:
        """The groups that stand out."""
        return tuple(group for group in self.groups if group.stands_out)

    def to_json(self) -> dict[str, Any]:
        """The members that `tcap sensitivity --json` prints, as JSON values."""
        return {
            "format": "tensorcap-sensitivity",
            "version": 1,
            "metric": self.metric,
            "by": self.by,
            "total": json_value(self.total),
            "floor": json_value(self.floor),
            "groups": json_value(self.groups),
            "blocks": json_value(self.blocks),
            "runs": self.runs,
            "known_runs": self.known_runs,
            "layers": self.layers,
            "left_out": dict(self.left_out),
            "goal": self.goal or None,
            "keep": list(self.keep),
            "reached": json_value(self.reached),
            "is_reached": self.is_reached,
            "bytes_kept": self.bytes_kept,
            "lists": {form: precision_list(self.keep, form) for form in LISTS},
            "exit_status": self.exit_status,
        }


def sensitivity(
    reference_model: Workload,
    target_model: Workload,
    *,
    by: Grouping = "layer",
    metric: str | None = None,
    goal: str | None = None,
    state: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure what each layer of a target costs of its output, by runs with that layer exchanged.

    Args:
        reference_model: The trusted model and its inputs.
        target_model: The target, quantised or in another precision, with the same inputs.
        by: `layer`; `block`, the outermost list of modules; or `class`, layers whose paths differ in numbers
            alone.
        metric: `kl`, `top1`, or `FILE.py:FUNCTION` that gives a number, less being better, for the
            reference's output and another one; that of the goal, or `kl`, if None.
        goal: `kl=0.01`: the layers that have to stay for it are chosen.
        state: A file that keeps what runs came to, so that an interrupted search goes on.
        progress: Shows what is run, and how many runs there were.

    Raises:
        UsageError: No layer can be exchanged; the outputs have unlike shapes; the metric fails; the goal is
            of another metric; the state is of another search.
    """
    wanted = None if goal is None else parse_goal(goal)
    if wanted is not None and metric is not None and metric != wanted.metric:
        raise UsageError(f"goal {goal!r}: is of {wanted.metric}, expected one of the metric {metric!r}")
    measure = metric_of(metric or (wanted.metric if wanted else "kl"))
    if by not in GROUPINGS:
        raise UsageError(f"by {by!r}: expected one of {', '.join(GROUPINGS)}")
    grafts = adapter_for(target_model.model).grafts(reference_model, target_model)
    if not grafts.layers:
        left = f"; {counted(len(grafts.left_out), 'module')} left out" if grafts.left_out else ""
        raise UsageError(
            f"the target has no layer that is not the reference's and can be exchanged{left}",
            hint="Layers are modules of the same path in both models with other tensors.",
        )
    search = _Search(
        grafts, measure, wanted, by, None if state is None else Path(state), progress or Silent()
    )
    return search.run()


class _Search:
    """One search under way."""

    def __init__(
        self,
        grafts: Grafts,
        metric: OutputMetric,
        goal: Goal | None,
        by: Grouping,
        state: Path | None,
        progress: Progress,
    ) -> None:
        """Run the reference, whose output all others are held against, and the target as it is."""
        self._grafts = grafts
        self._metric = metric
        self._goal = goal
        self._by: Grouping = by
        self._progress = progress
        self._layers: dict[str, Layer] = dict(grafts.layers)
        self._left_out = dict(grafts.left_out)
        progress.stage("running the reference")
        self._trusted: Array = grafts.output("reference")
        progress.stage("running the target as it is")
        output = grafts.output("target")
        outputs = [hashlib.sha256(side.tobytes()).hexdigest() for side in (self._trusted, output)]
        about = {"layers": list(self._layers), "metric": metric.name, "outputs": outputs}
        self._log = RunLog(state, "sensitivity", about)
        self._losses: dict[str, float | str] = dict(self._log.load(_read_loss))  # a text: why a run failed
        self._kept = frozenset(self._losses)  # names of runs that the file kept
        self._asked_for: set[str] = set()  # of these
        self._made = 0
        self._total = self._measure("target", output)

    def run(self) -> Sensitivity:
        """Measure groups, then layers within bad ones, then choose what stays.

        1. The target is run as it is, and with all layers the reference's.
        2. Blocks are exchanged, each alone, both ways; layers outside of blocks, and classes, likewise.
        3. By layer, blocks are taken apart that cost more than twice what blocks do, or all of fewer than
           three; with a goal the most costly ones until the rest costs at most half of it.
        4. Layers stand out that cost four times what layers do, more than the spread of costs lets expect,
           and a twentieth of all.
        5. With a goal the most costly layers are kept until it is reached, as the sum of the costs of the
           others predicts and runs confirm; each that it is reached without is let go again.
        """
        total = self._total
        self._drop_misfits()
        floor = self._loss("target", tuple(self._layers))
        groups = [
            group for name, layers in self._first_groups().items() for group in self._measured(name, layers)
        ]
        if not groups:
            raise self._nothing_exchanged()
        opened: list[LayerGroup] = []
        if self._by == "layer":
            for block in self._bad_blocks(groups, total):
                groups.remove(block)
                groups += self._taken_apart(block)
                opened.append(block)
        groups = self._with_outliers(groups)
        keep: tuple[str, ...] = tuple(layer for g in groups if g.stands_out for layer in g.layers)
        reached, is_reached = None, None
        if self._goal is not None:
            keep, groups, reached = self._greedy(groups, total, floor)
            groups = self._with_outliers(groups)
            is_reached = reached <= self._goal.limit
        elif keep:
            reached = self._loss("target", keep)
        is_whole = [self._by == "layer" and len(group.layers) > 1 for group in groups]
        return Sensitivity(
            self._metric.name,
            self._metric.text,
            total,
            floor,
            self._by,
            _ranked(g for g, whole in zip(groups, is_whole, strict=True) if not whole),
            _ranked(g for g, whole in zip(groups, is_whole, strict=True) if whole),
            self._made + 2,
            len(self._asked_for),
            len(self._layers),
            self._left_out,
            self._goal.text if self._goal else "",
            keep,
            reached,
            is_reached,
            sum(self._saved(layer) for layer in keep),
        )

    def _drop_misfits(self) -> None:
        """Leave out layers with which the target does not run, if it does not run with all of them."""
        if self._try("target", tuple(self._layers)) is not None:
            return
        for layer in list(self._layers):
            if self._try("target", (layer,)) is None:
                self._leave_out(layer)
        if not self._layers:
            raise self._nothing_exchanged()
        if self._try("target", tuple(self._layers)) is None:
            raise UsageError(
                "the target cannot be grafted: it runs with each of its layers exchanged, and not with all"
            )

    def _first_groups(self) -> dict[str, tuple[str, ...]]:
        """The layers of each block, or class, in the target's order."""
        groups: dict[str, list[str]] = {}
        for layer in self._layers:
            name = _DIGITS.sub("*", layer) if self._by == "class" else _block_of(layer) or layer
            groups.setdefault(name, []).append(layer)
        return {name: tuple(layers) for name, layers in groups.items()}

    def _measured(self, name: str, layers: tuple[str, ...], block: str = "") -> list[LayerGroup]:
        """Exchange a group, both ways; if the target does not run with it, its layers, or nothing."""
        kept = self._try("target", layers)
        if kept is None and len(layers) > 1:
            return [group for layer in layers for group in self._measured(layer, (layer,), name)]
        if kept is None:
            self._leave_out(*layers)
            return []
        alone = self._try("reference", layers)
        cost = self._total - kept if alone is None else alone
        return [LayerGroup(name, layers, alone, kept, cost, sum(map(self._saved, layers)), block=block)]

    def _taken_apart(self, block: LayerGroup) -> list[LayerGroup]:
        return [group for layer in block.layers for group in self._measured(layer, (layer,), block.name)]

    def _leave_out(self, layer: str) -> None:
        reason = self._losses[_name_of("target", (layer,))]
        self._left_out[layer] = f"the target does not run with the reference's: {reason}"
        del self._layers[layer]

    def _nothing_exchanged(self) -> UsageError:
        reason = next(iter(self._left_out.values()))
        return UsageError(
            "the target cannot be grafted: no layer can be exchanged, "
            f"{len(self._left_out)} left out: {reason}"
        )

    def _bad_blocks(self, groups: Sequence[LayerGroup], total: float) -> list[LayerGroup]:
        """The groups of several layers that are looked at."""
        blocks = [group for group in _ranked(groups) if len(group.layers) > 1]
        if len(blocks) < _FEW_BLOCKS:
            return blocks
        middle = statistics.median(max(0.0, group.cost) for group in blocks)
        bad = [group for group in blocks if group.cost > _BAD_BLOCK * middle or group.alone is None]
        if self._goal is not None and total > self._goal.limit:
            rest = sum(max(0.0, group.cost) for group in blocks if group not in bad)
            for group in blocks:
                if rest <= _LEFT * self._goal.limit:
                    break
                if group not in bad:
                    bad.append(group)
                    rest -= max(0.0, group.cost)
        return bad

    def _with_outliers(self, groups: Sequence[LayerGroup]) -> list[LayerGroup]:
        """Mark the layers, or groups, that cost far more than those in general."""
        by_layer = self._by == "layer"
        costs = [g.cost / (len(g.layers) if by_layer else 1) for g in groups if g.cost > 0]
        if len(costs) < _FEWEST:
            return [replace(group, stands_out=False) for group in groups]
        logs = [math.log(cost) for cost in costs]
        middle = statistics.median(logs)
        spread = _NORMAL * statistics.median(abs(log - middle) for log in logs)
        least = math.exp(middle + max(math.log(_OUTLIER), _SIGMAS * spread))
        limit = max(least, _SHARE * sum(max(0.0, group.cost) for group in groups))
        return [
            replace(g, stands_out=g.cost > limit and (not by_layer or len(g.layers) == 1)) for g in groups
        ]

    def _greedy(
        self, groups: Sequence[LayerGroup], total: float, floor: float
    ) -> tuple[tuple[str, ...], list[LayerGroup], float]:
        """The layers that stay for the goal: what is kept, all groups, and the loss with these kept.

        Losses of independent errors add up, so that those of the layers that are not kept say how many have
        to be; runs then say whether that is so. Then each is let go again, and two in a row, if the goal is
        reached without; and one fewer are tried by what each gains alone if it is kept.
        """
        assert self._goal is not None
        limit = self._goal.limit
        units = list(_ranked(groups))
        if total <= limit:
            return (), units, total
        if floor > limit:
            return tuple(self._layers), units, floor
        count = self._predicted_count(units, total)
        while True:
            if self._by == "layer" and any(len(unit.layers) > 1 for unit in units[:count]):
                block = next(unit for unit in units[:count] if len(unit.layers) > 1)
                units.remove(block)
                units = list(_ranked([*units, *self._taken_apart(block)]))
                count = self._predicted_count(units, total)
                continue
            loss = self._loss("target", _layers_of(units[:count]))
            if loss <= limit or count == len(units):
                break
            count += 1
        kept = units[:count]
        for size in (1, 2):  # errors of two may make up for each other
            for at in range(len(kept) - size, -1, -1):
                fewer = [*kept[:at], *kept[at + size :]]
                if fewer and self._loss("target", _layers_of(fewer)) <= limit:
                    kept = fewer
        by_gain = sorted(units, key=lambda unit: unit.kept)
        while len(kept) > 1 and self._loss("target", _layers_of(by_gain[: len(kept) - 1])) <= limit:
            kept = by_gain[: len(kept) - 1]
        return _layers_of(kept), units, self._loss("target", _layers_of(kept))

    def _predicted_count(self, units: Sequence[LayerGroup], total: float) -> int:
        """How many of the most costly have to be kept, if losses add up to the target's."""
        assert self._goal is not None
        costs = [max(0.0, unit.cost) for unit in units]
        scale = total / sum(costs) if sum(costs) > 0 else 1.0
        return next(
            (n for n in range(1, len(units)) if scale * sum(costs[n:]) <= self._goal.limit), len(units)
        )

    def _saved(self, layer: str) -> int:
        return self._layers[layer].reference_bytes - self._layers[layer].target_bytes

    def _loss(self, side: GraftSide, layers: Collection[str]) -> float:
        """The loss of a run with some layers exchanged.

        Raises:
            UsageError: The run fails.
        """
        loss = self._try(side, layers)
        if loss is None:
            reason = self._losses[_name_of(side, layers)]
            what = ", ".join(list(layers)[:3]) or "as it is"
            raise UsageError(f"the {side} does not run ({what}): {reason}")
        return loss

    def _try(self, side: GraftSide, layers: Collection[str]) -> float | None:
        """The loss of a run with some layers exchanged; None if it fails."""
        name = _name_of(side, layers)
        known = self._losses.get(name)
        if known is not None:
            if name in self._kept:
                self._asked_for.add(name)
            return None if isinstance(known, str) else known
        self._progress.stage(f"{'keeping' if side == 'target' else 'only'} {_short(layers)}")
        self._progress.advance(self._made + 1, None)
        try:
            output = self._grafts.output(side, layers)
        except UsageError:
            raise
        except Exception as error:  # of a user's model, which may refuse what it is given
            self._keep(name, f"{type(error).__name__}: {one_line(str(error))[:200]}")
            return None
        loss = self._measure(side, output)
        self._keep(name, loss)
        return loss

    def _keep(self, name: str, loss: float | str) -> None:
        """Keep what a run came to."""
        self._losses[name] = loss
        self._made += 1
        is_infinite = isinstance(loss, float) and math.isinf(loss)
        self._log.add({"run": name, "loss": str(loss) if is_infinite else loss})

    def _measure(self, side: GraftSide, output: Array) -> float:
        """The loss of an output."""
        if output.shape != self._trusted.shape:
            raise UsageError(
                f"the {side}'s output is {list(output.shape)}, expected {list(self._trusted.shape)} as the "
                "reference's",
                hint="Both workloads need the same inputs.",
            )
        return self._metric.measure(self._trusted, output)


def _read_loss(line: Mapping[str, Any]) -> tuple[str, float | str]:
    """The name of a run in its log, and what it came to."""
    loss = line["loss"]
    is_reason = isinstance(loss, str) and loss not in ("inf", "-inf")
    return line["run"], loss if is_reason else float(loss)


def _name_of(side: GraftSide, layers: Collection[str]) -> str:
    return f"{side}: {' '.join(sorted(layers))}"


def _short(layers: Collection[str]) -> str:
    if not layers:
        return "no layer"
    first = next(iter(layers))
    return first if len(layers) == 1 else f"{first} and {len(layers) - 1} more"


def _layers_of(units: Sequence[LayerGroup]) -> tuple[str, ...]:
    return tuple(layer for unit in units for layer in unit.layers)


def _ranked(groups: Iterator[LayerGroup] | Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """The most costly first; of equal ones those that save fewer bytes."""
    return tuple(sorted(groups, key=lambda group: (-group.cost, group.bytes_saved)))


def _block_of(layer: str) -> str:
    """The member of the outermost list of modules that a layer lies in; "" for none."""
    parts = layer.split(".")
    at = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[: at + 1])
