"""What a folder of intermediates was given, in lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tensorcap.wording import counted
from tensorcap_cli.text.output import size_text

if TYPE_CHECKING:
    from tensorcap.adapters import GraphDump


def graph_dump_lines(dump: GraphDump) -> Iterator[str]:
    """The folder with the count of its values, and a note for each reason why some are not there."""
    yield f"{dump.folder}: {counted(dump.values, 'value')} of the graph, {size_text(dump.nbytes)}"
    for reason, count in dump.left_out.items():
        yield f"note: {counted(count, 'value')} left out: {reason}"
