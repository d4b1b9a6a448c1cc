"""Stage 2, its files: a test of each component for pytest, which a person reads and edits.

`tests/conftest.py` has what they share, `tests/test_NN_KIND.py` the components of one kind, the simplest
kinds first, and `tests/components.json` what is known of each. The tensors lie in `captures/components`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from tensorcap.equivalence import captures, mapping
from tensorcap.equivalence.component_kinds import KINDS, Component
from tensorcap.equivalence.component_tensors import FILES, Components, write_tensors
from tensorcap.equivalence.experiment import Experiment
from tensorcap.equivalence.models import MODEL_SETTINGS
from tensorcap.equivalence.stage import Stage, StageResult
from tensorcap.wording import counted, some
from tensorcap_formats.progress import Progress

TESTS: Final = "tests"
COMPONENTS: Final = f"{TESTS}/components.json"
TENSORS: Final = f"{captures.FOLDER}/components"
_CONFTEST: Final = '''"""What tests of components share; made by `tcap equivalence components`, yours to edit.

`component(NAME)` starts the test of a component. `tensors(KEY)` of it are three arrays of float64 of one
shape: the reference (the source in {wide}), the baseline ({low}) and the
port, all on the arguments that the port's module was given. `compare` computes R, and `assert_passed` fails
the test if an R is not below `tau_r`: that of equivalence.toml, unless `compare` is given another one.

If a result has another shape or layout on the port's side, align it before it is compared:

    three = model_norm.tensors("0/model.norm/output")
    model_norm.compare(three._replace(port=three.port[..., :64]))

`pytest {folder}` runs them alone.
"""

from pathlib import Path

import pytest

from tensorcap.equivalence.component_plugin import component_tests


@pytest.fixture(scope="session")
def components(pytestconfig):
    with component_tests(Path(__file__).parents[1], pytestconfig) as tests:
        yield tests


@pytest.fixture
def component(components, request):
    return lambda name: components.start(name, request)
'''


def write_tests(experiment: Experiment, progress: Progress) -> StageResult:
    """Write the tensors of all components, and a test of each; files that a person has edited stay."""
    components = write_tensors(experiment, captures.TARGET, TENSORS, progress)
    progress.stage("writing the tests")
    names = [experiment.write_editable(f"{TESTS}/conftest.py", _conftest(experiment))]
    for kind, group in groupby(components.tested, key=lambda component: component.kind):
        name = f"{TESTS}/test_{KINDS.index(kind):02d}_{kind}.py"
        experiment.write_editable(name, _test_file(kind, list(group)))
        names.append(name)
    stale = [name for name in STAGE.files_in(experiment) if name.startswith(f"{TESTS}/test_")]
    for name in set(stale) - set(names):
        if not experiment.is_edited(name):
            (experiment.folder / name).unlink()
    experiment.write_json(COMPONENTS, _content(components))
    kinds = [f"{len(list(group))} {kind}" for kind, group in groupby(components.tested, key=lambda c: c.kind)]
    words = [f"{counted(len(components.tested), 'component')}: {', '.join(kinds)}."]
    if components.left_out:
        texts = [f"{site} ({reason})" for site, reason in components.left_out]
        words.append(f"Not tested: {counted(len(texts), 'module')}: {some(texts)}.")
    if components.natural:
        count = counted(len(components.natural), "argument")
        words.append(f"Without one in the port, so that the source's own stayed: {count}.")
    tensors = [f"{TENSORS}/{name}" for name in FILES]
    return StageResult("none", tuple(words), (*names, COMPONENTS, *tensors))


def _content(components: Components) -> dict[str, Any]:
    return {
        "tested": [
            {
                "site": one.site,
                "number": number,
                "kind": one.kind,
                "place": one.place,
                "source_class": one.source_class,
                "results": list(one.keys),
                "extra_roundings": components.roundings[one.site],
            }
            for number, one in enumerate(components.tested)
        ],
        "left_out": [{"site": site, "reason": reason} for site, reason in components.left_out],
        "natural": list(components.natural),
    }


def _conftest(experiment: Experiment) -> str:
    run = experiment.settings.run
    low = f"the source in {run.dtype}"
    if not run.reference_dtype:
        low = "the same with its arguments put off by the machine epsilon"
    return _CONFTEST.format(wide=run.reference_dtype or run.dtype, low=low, folder=experiment.folder / TESTS)


def _test_file(kind: str, components: Sequence[Component]) -> str:
    count = counted(len(components), "component")
    head = f'"""{count} of the kind {kind}; made by `tcap equivalence components`, and yours to edit."""\n'
    return head + "".join(line for one in components for line in _test(one))


def _test(component: Component) -> Iterator[str]:
    name = re.sub(r"\W+", "_", component.site).strip("_")
    variable = f"module_{name}" if name[:1].isdigit() else name
    shapes = ", ".join("x".join(map(str, shape)) for shape in component.shapes)
    yield f"\n\ndef test_{name}(component):\n"
    yield f'    """{component.source_class or component.site} of the source: {shapes}."""\n'
    yield f"    {variable} = component({component.site!r})\n"
    for key in component.keys:
        yield f"    {variable}.compare({variable}.tensors({key!r}))\n"
    yield f"    {variable}.assert_passed()\n"


STAGE: Final = Stage(
    2,
    "component-tests",
    "a test of each component",
    write_tests,
    (f"{TESTS}/*.py", COMPONENTS, f"{TENSORS}/*.h5"),
    needs=(captures.STAGE, mapping.STAGE),
    settings=(*MODEL_SETTINGS, "run.dtype", "run.reference_dtype"),
    edited_files=(f"{TESTS}/*.py",),
)
