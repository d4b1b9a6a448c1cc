"""Options of commands that read archives, and of what they print."""

from __future__ import annotations

from typing import Final

import click

map_option: Final = click.option(
    "--map",
    "mapping",
    metavar="FILE",
    type=click.Path(),
    help="What belongs together, as `tcap align` writes it; `none` pairs equal keys alone.",
)
rules_option: Final = click.option(
    "--rules", metavar="FILE", type=click.Path(), help="Rules of names, .toml, before the built-in ones."
)
only_option: Final = click.option(
    "--only", metavar="GLOB", multiple=True, help="Take only what matches; may be repeated."
)
exclude_option: Final = click.option(
    "--exclude", metavar="GLOB", multiple=True, help="Leave out what matches; may be repeated."
)
rtol_option: Final = click.option(
    "--rtol", type=float, metavar="R", help="Error allowed relative to |reference|; alone, atol is 0."
)
atol_option: Final = click.option(
    "--atol", type=float, metavar="A", help="Absolute error allowed; alone, rtol is 0."
)
compute_dtype_option: Final = click.option(
    "--compute-dtype",
    metavar="DTYPE",
    help="Precision in which the target computed, if its archive does not say.",
)
reference_repeat_option: Final = click.option(
    "--reference-repeat",
    metavar="ARCHIVE",
    type=click.Path(),
    help="A second run of the reference: is it bit-equal to the first?",
)
target_repeat_option: Final = click.option(
    "--target-repeat",
    metavar="ARCHIVE",
    type=click.Path(),
    help="A second run of the target: how far it differs from run to run.",
)
output_option: Final = click.option(
    "-o",
    "--output",
    metavar="ARCHIVE",
    type=click.Path(),
    help="The archive: .h5, .zarr or .safetensors.",
)
json_option: Final = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
