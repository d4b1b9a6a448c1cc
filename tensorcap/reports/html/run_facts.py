"""What both runs say of themselves, and what differs apart from tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tensorcap.comparison.preflight import side_texts
from tensorcap.reports.html.sources import ReportSource
from tensorcap.wording import WIDEST_NAME, shortened


@dataclass(frozen=True, slots=True)
class RunFact:
    """One thing that is known of both runs.

    Attributes:
        name: What.
        reference: Of the reference, "-" if unknown.
        target: Of the target.
        differs: Whether to mark it.
        text: What the difference means, as a sentence; "" if that is plain.
        explains: Whether it alone can make outputs differ by more than rounding does.
    """

    name: str
    reference: str
    target: str
    differs: bool
    text: str = ""
    explains: bool = False


def run_facts(source: ReportSource) -> Iterator[RunFact]:
    """Both runs side by side: what the archives say of themselves, then what else differs."""
    yield from _archive_facts(source)
    yield from _differences(source)


def _archive_facts(source: ReportSource) -> Iterator[RunFact]:
    """What the archives say of themselves, a line for each thing."""
    sides = source.comparison.reference, source.comparison.target
    for name, texts in (
        ("archive", [str(side.path) for side in sides]),
        ("model", [side.model.rpartition(".")[2] for side in sides]),
        ("weights in", [side.dtype for side in sides]),
        ("computed in", [side.compute_dtype for side in sides]),
        ("tensors", [str(side.records) for side in sides]),
        ("run ended", [side.error or ("as it should" if side.is_complete else "early") for side in sides]),
    ):
        if any(texts):
            ours, theirs = (shortened(text) or "-" for text in texts)
            yield RunFact(name, ours, theirs, ours != theirs and name not in ("archive", "tensors"))
    if source.archives is None:
        return
    infos = [archive.info for archive in source.archives]
    seeds = [str(info.workload.options.get("seed", "")) for info in infos]
    for name, texts in (
        ("framework", [info.framework for info in infos]),
        ("device", [info.device for info in infos]),
        ("seed", seeds),
        ("attention", [info.attention_implementation for info in infos]),
    ):
        if any(texts):
            ours, theirs = (shortened(text) or "-" for text in texts)
            yield RunFact(name, ours, theirs, ours != theirs)


def _differences(source: ReportSource) -> Iterator[RunFact]:
    """What differs apart from tensors: versions, configuration, inputs."""
    preflight = source.examination.preflight
    for item in preflight.items if preflight else ():
        ours, theirs = side_texts(item, WIDEST_NAME)
        yield RunFact(f"{item.kind}: {shortened(item.name)}", ours, theirs, True, item.text, item.explains)
