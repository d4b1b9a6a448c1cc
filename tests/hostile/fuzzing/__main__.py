"""Try any number of hostile inputs, over all readers or some, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path

import click

from tests.hostile.fuzzing.runner import Outcomes, fuzz
from tests.hostile.fuzzing.seeds import SEEDS, available

_SHARE = 1000  # inputs of one process


@click.command()
@click.option("-n", "--count", type=click.IntRange(1), default=20_000, help="Of inputs over all readers.")
@click.option("--first", type=click.IntRange(0), default=0, help="Number of the first input of each reader.")
@click.option("--reader", "readers", multiple=True, type=click.Choice(sorted(SEEDS)), help="Only these.")
@click.option("-j", "--jobs", type=click.IntRange(1), default=os.cpu_count() or 1)
@click.option("--keep", type=click.Path(path_type=Path), help="With one input: leave it in this folder.")
def main(count: int, first: int, readers: tuple[str, ...], jobs: int, keep: Path | None) -> None:
    """Try hostile inputs and count what came of them; exit status 1 if one did what none may.

    An input is drawn from its reader's name and its number alone:

    \b
        python -m tests.hostile.fuzzing -n 1 --reader torch --first 4711 --keep failing
    """
    names = readers or tuple(available())
    for name in () if readers else sorted(SEEDS.keys() - set(names)):
        click.echo(f"{name}: left out, as the package that writes its seed is not installed")
    each = -(-count // len(names))
    place = keep or Path(tempfile.mkdtemp(prefix="fuzz-"))
    outcomes = {name: Outcomes() for name in names}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        shares: dict[Future[Outcomes], tuple[str, range]] = {}
        for start in range(first, first + each, _SHARE):
            for name in names:
                numbers = range(start, min(start + _SHARE, first + each))
                shares[pool.submit(fuzz, name, numbers, place / f"{name}-{start}")] = name, numbers
        for share in as_completed(shares):
            name, numbers = shares[share]
            result = share.result()
            outcomes[name].answers += result.answers
            outcomes[name].failures |= result.failures
            for number, failure in sorted(result.failures.items()):
                click.echo(f"{name} {number}: {failure}", err=True)
    if keep is None:
        shutil.rmtree(place)
    total: Counter[str] = Counter()
    for name, result in outcomes.items():
        answers = ", ".join(f"{count} {answer}" for answer, count in result.answers.most_common())
        click.echo(f"{name}: {answers}; {len(result.failures)} failed")
        total += result.answers
    failed = sum(len(result.failures) for result in outcomes.values())
    click.echo(f"{sum(total.values()) + failed} inputs, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
