"""`tcap bisect`: where two runs part, by looking at few of their tensors."""

from __future__ import annotations

import click

from tensorcap_cli.output import class_text, counting, one_line, plural, print_json


@click.command("bisect", short_help="Find where two runs part by reading few tensors.")
@click.argument("reference", metavar="REF", type=click.Path())
@click.argument("target", metavar="TGT", type=click.Path())
@click.option(
    "--rtol", type=float, metavar="R", help="Error allowed relative to |reference|; alone, atol is 0."
)
@click.option("--atol", type=float, metavar="A", help="Absolute error allowed; alone, rtol is 0.")
@click.option("--compute-dtype", metavar="DTYPE", help="Precision in which TGT computed, if it does not say.")
@click.option("--map", metavar="FILE", type=click.Path(), help="As for `tcap compare`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(
    reference: str,
    target: str,
    *,
    rtol: float | None,
    atol: float | None,
    compute_dtype: str | None,
    map: str | None,  # the option's name
    as_json: bool,
) -> None:
    """Find the first result of a module that is not green, reading about log2(n) tensors of each archive.

    Results of modules are searched in order of execution, those with equal digests without being read. That
    errors stay once they are there is checked on a few more; where they do not, all are read up to the first.
    An error too small for its place is not seen: `tcap compare` looks at every tensor.

    \b
        tcap bisect ref.h5 tgt.h5
        tcap bisect ref.h5 tgt.h5 --rtol 1e-2 --map map.toml

    Exit status: 0 no result is bad; 1 one is; 2 wrong usage; 3 an archive or a tensor cannot be read.
    """
    from tensorcap.bisecting import bisect_archives

    with counting("bisecting") as tell:
        found = bisect_archives(
            reference, target, rtol=rtol, atol=atol, compute_dtype=compute_dtype, mapping=map, tell=tell
        )
    divergence, first = found.divergence, found.first
    if as_json:
        print_json(
            {
                "format": "tensorcap-bisection",
                "version": 1,
                "results": found.results,
                "first": first.key if first else None,
                "status": first.status if first else None,
                "last_green": found.last_green.key if found.last_green else None,
                "module": divergence.module if divergence else None,
                "class": divergence.class_name if divergence else None,
                "how": found.how,
                "against": found.against or None,
                "read": list(found.read),
                "exit_status": found.exit_status,
            }
        )
    else:
        if found.against:
            click.echo(
                f"Errors do not stay: {found.against} spoke against the search, so it read on in order."
            )
        if first is None:
            click.secho("No result that was looked at is bad.", fg="green", bold=True)
        else:
            click.secho(f"FIRST BAD RESULT  {first.key}  ({first.status})", fg="red", bold=True)
            for finding in first.findings[:1]:
                click.echo(f"  {one_line(finding.text)}")
            if found.last_green is not None:
                click.echo(f"  before it {found.last_green.key} is {found.last_green.status}")
            if divergence is not None:
                name = f" ({class_text(divergence.class_name)})" if divergence.class_name else ""
                click.echo(f"  module {divergence.module}{name}: {one_line(divergence.explanation)}")
                for finding in divergence.pair.findings:
                    if finding.status != "within-rounding":
                        click.echo(f"  {one_line(finding.text)}")
        read = plural(len(found.read), "tensor")
        click.echo(f"{read} of each side read, of {plural(found.results, 'result')} (by {found.how})")
    click.get_current_context().exit(found.exit_status)
