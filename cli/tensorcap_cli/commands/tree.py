"""`tcap tree`: the modules of an archive or a model, and where two trees differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tensorcap.wording import counted, one_line, printable
from tensorcap_cli.options.archives import json_option
from tensorcap_cli.options.run import config_option, is_workload, layers_option, trust_option
from tensorcap_cli.options.sections import Command
from tensorcap_cli.text.output import option_text, print_json

if TYPE_CHECKING:
    from tensorcap.alignment.names import TreeDifference
    from tensorcap.runs import Tree

_FORMATS = ("text", "full", "compressed", "paths")
_SAME_NAMES = "The names are equal; types and shapes are not known on both sides."
_VERBS = {
    "missing": "missing",
    "extra": "extra",
    "nested": "elsewhere",
    "count": "unlike count",
    "type": "other type",
    "activation": "other activation",
    "shape": "other shape",
}


@click.command(
    "tree", cls=Command, short_help="Show the modules of an archive or a model, or compare two trees."
)
@click.argument("source", metavar="ARCHIVE|MODEL")
@click.option("--diff", "other", metavar="ARCHIVE|MODEL", help="Say where this one's tree differs.")
@click.option(
    "--depth", metavar="N", type=click.IntRange(min=0), help="Levels below the root that are shown."
)
@click.option("--params", is_flag=True, help="Show parameters with their shapes.")
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default="text",
    help="Or one of the Equivalence method's files: full or compressed tree as JSON, paths, one a line.",
)
@json_option
@layers_option
@config_option
@trust_option
def command(
    source: str,
    *,
    other: str | None,
    depth: int | None,
    params: bool,
    form: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the module tree of an archive, or of a model: a Hugging Face folder or id, or FILE.py:FUNCTION.

    Equal members of a list are one line, `layers[0..47] (48)`: equal in names, types and shapes. Of a
    Hugging Face model only the configuration is read. With --diff the first tree is the reference; names
    are compared without wrappers.

    \b
        tcap tree ref.h5 --depth 3
        tcap tree meta-llama/Llama-3.2-1B --params
        tcap tree ref.h5 --diff port.py:make
        tcap tree ref.h5 --format compressed > model_tree.json

    Exit status: 0 shown, or no difference; 1 the trees differ; 2 wrong usage; 3 an archive cannot be read.
    """
    if other is not None and (form != "text" or depth is not None or params):
        raise click.UsageError("--diff compares whole trees, expected no --format, --depth or --params.")
    if as_json and form != "text":
        raise click.UsageError("--json and --format exclude each other.")
    options = {name: value for name, value in options.items() if value}
    if "config" in options:
        from tensorcap.session import parse_setting

        options["config"] = dict(map(parse_setting, options["config"]))
    if options and not any(is_workload(path) for path in (source, other) if path):
        raise click.UsageError(f"{option_text(next(iter(options)))} is for models, found archives only.")
    tree = _tree(source, options)
    if other is not None:
        click.get_current_context().exit(_print_differences(tree, _tree(other, options), as_json=as_json))
    _print(tree, form, depth, params=params, as_json=as_json)


def _tree(path: str, options: dict[str, Any]) -> Tree:
    from tensorcap.runs import Tree

    if is_workload(path):
        from tensorcap.session import Recipe
        from tensorcap_formats.run_info import RunInfo

        recipe = Recipe.named(path, options if not path.rpartition(":")[0].endswith(".py") else {})
        tree = Tree.of_run(path, RunInfo.of(recipe.described()))
        if tree is None:
            raise click.UsageError(f"{path}: has no modules.")
        return tree
    from tensorcap_formats.open import open_archive

    with open_archive(path) as archive:
        return Tree.of(archive)


def _print(tree: Tree, form: str, depth: int | None, *, params: bool, as_json: bool) -> None:
    import json

    from tensorcap.runs import compressed, full, paths, tree_lines

    if as_json:
        facts = _facts(tree)
        print_json({**facts, "tree": full(tree.root, depth), "parameters": _parameters(tree, depth)})
    elif form == "paths":
        click.echo("\n".join(paths(tree.root, depth)))
    elif form != "text":
        nodes = full(tree.root, depth) if form == "full" else compressed(tree.root, depth)
        click.echo(json.dumps(nodes, indent=2, ensure_ascii=False))
    else:
        click.echo(_headline(tree))
        for line in tree_lines(tree.root, depth=depth, shapes=params):
            click.echo(printable(line))


def _headline(tree: Tree) -> str:
    facts = _facts(tree)
    if not tree.has_modules:
        return f"{tree.source}: lists no modules, so this is a tree of the names of its tensors"
    never = f", {facts['never_called']} never called" if facts["never_called"] else ""
    activations = "".join(f", {key} {one_line(value)}" for key, value in tree.activations.items())
    return f"{tree.source}: {counted(facts['modules'], 'module')}{never}{activations}"


def _facts(tree: Tree) -> dict[str, Any]:
    nodes = list(tree.root.walk())
    return {
        "path": tree.source,
        "lists_modules": tree.has_modules,
        "modules": len(nodes),
        "never_called": sum(node.is_never_called for node in nodes),
        "activations": dict(tree.activations),
    }


def _parameters(tree: Tree, depth: int | None) -> dict[str, Any]:
    from tensorcap.runs import paths

    shown = {"", *paths(tree.root, depth)}
    return {
        f"{node.path}.{name}" if node.path else name: shape
        for node in tree.root.walk()
        for name, shape in (node.shapes or {}).items()
        if node.path in shown
    }


def _print_differences(reference: Tree, target: Tree, *, as_json: bool) -> int:
    """Print what differs, and give the exit status."""
    from tensorcap.alignment.names import tree_differences
    from tensorcap_formats.json_values import json_object

    differences = tree_differences(reference, target)
    if as_json:
        print_json(
            {
                "reference": _facts(reference),
                "target": _facts(target),
                "differences": [
                    {"kind": one.kind, "place": one.place, **json_object(one)} for one in differences
                ],
            }
        )
        return bool(differences)
    click.echo(f"reference {_headline(reference)}")
    click.echo(f"target    {_headline(target)}")
    if not differences:
        click.echo("The trees are equal." if reference.has_modules and target.has_modules else _SAME_NAMES)
    for one in differences:
        click.echo(one_line(f"{_VERBS[one.kind]}: {_text(one)}"))
    if differences:
        count = sum(len(one.paths) for one in differences)
        click.echo(f"{counted(count, 'difference')} at {counted(len(differences), 'place')}")
    return bool(differences)


def _text(one: TreeDifference) -> str:
    if one.kind == "nested":
        return f"{one.place}, in the target {one.target}"
    if one.kind in ("missing", "extra"):
        return f"{one.place}: {one.reference or one.target}"
    return f"{one.place}: {one.reference or 'none'}, in the target {one.target or 'none'}"
