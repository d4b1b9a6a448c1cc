"""Why a pair has its status, as text: `tcap compare --why KEY`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tensorcap.wording import one_line
from tensorcap_cli.text.output import DASH, print_table, short_number

if TYPE_CHECKING:
    from tensorcap.comparison import Explanation


def print_explanation(explanation: Explanation) -> None:
    """Print each stage and test that looked at a pair, and which decided."""
    from tensorcap.comparison import describe_test

    click.secho(f"{explanation.key}: {explanation.status}, by {explanation.decided_by}", bold=True)
    click.echo()
    rows = [
        (
            step.stage,
            describe_test(step.test) if step.test else DASH,
            DASH if step.value is None else short_number(step.value),
            DASH if step.limit is None else short_number(step.limit),
            step.status or DASH,
            "decides" if step.is_decisive else "",
            one_line(step.text),
        )
        for step in explanation.steps
    ]
    headers = ("STAGE", "TEST", "VALUE", "LIMIT", "RESULT", "", "")
    print_table(headers, rows, left=(0, 1, 4, 5, 6), flexible=6)
