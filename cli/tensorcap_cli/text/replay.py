"""A replay as text or JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from tensorcap.wording import counted
from tensorcap_cli.text.output import DASH, number_text, one_line, print_json, print_table

if TYPE_CHECKING:
    from tensorcap.rerun.replay_result import Replay

_SHOWN: Final = 20


def print_replay(result: Replay, *, as_json: bool) -> None:
    """Print which modules have an error of their own.

    Args:
        result: The replay.
        as_json: JSON instead of text.
    """
    if as_json:
        from tensorcap.reports.result_json import json_value

        print_json(
            {
                "format": "tensorcap-replay",
                "version": 1,
                "precision": result.precision or None,
                "replaced": result.replaced,
                "natural": list(result.natural),
                "lacking": list(result.lacking),
                "is_self": result.is_self,
                "way": result.way,
                "notes": list(result.notes),
                "owns": [
                    {
                        "key": own.key,
                        "module": own.module,
                        "made": own.made,
                        "is_leaf": own.is_leaf,
                        "error": json_value(own.error),
                        "ratio": json_value(own.ratio),
                        "is_precise": own.is_precise,
                        "status": own.status,
                        "findings": [
                            {
                                "test": f.test,
                                "value": json_value(f.value),
                                "limit": f.limit,
                                "status": f.status,
                            }
                            for f in own.findings
                        ],
                    }
                    for own in result.owns
                ],
                "exit_status": result.exit_status,
            }
        )
        return
    for note in result.notes:
        click.secho(note, fg="yellow")
    if result.is_self and not result.exit_status:
        click.secho(
            f"The model gives its own {counted(len(result.owns), 'tensor')} back bit for bit.", fg="green"
        )
        return
    bad = sorted(result.bad, key=lambda own: own.made != "result" or not own.is_leaf)
    if not bad:
        judged = counted(len(result.owns) - len(result.unjudged), "tensor")
        what = "No module makes" if not result.exit_status else "No module that could be judged makes"
        color = "yellow" if result.exit_status else "green"
        click.secho(f"{what} an error of its own: {judged} within rounding.", fg=color, bold=True)
        return
    rows = []
    for own in bad[:_SHOWN]:
        error = DASH if own.error is None else number_text(own.error, 3)
        ratio = DASH if own.ratio is None else number_text(own.ratio, 3)
        tests = ",".join(dict.fromkeys(f.test for f in own.findings if f.status in ("suspect", "diverged")))
        rows.append((own.module, own.key, own.status, error, ratio, tests or DASH))
    print_table(("MODULE", "KEY", "STATUS", "OWN ERROR", "R", "TESTS"), rows, left=(0, 1, 2, 5), flexible=1)
    if len(bad) > _SHOWN:
        click.echo(f"and {len(bad) - _SHOWN} more")
    for finding in bad[0].findings:
        if finding.status in ("suspect", "diverged"):
            click.echo(f"  {one_line(finding.text)}")
