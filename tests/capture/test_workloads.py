"""What a workload is asked to run has to take its model and its inputs."""

from __future__ import annotations

import pytest

from tensorcap.workload import Workload
from tensorcap_formats.errors import UsageError


def test_a_function_that_does_not_take_the_inputs_is_refused_in_a_line() -> None:
    workload = Workload(abs, {"x": 1}, run=lambda model: model(1))
    message = r"run of a workload: .*'x', expected a function that is called as run\(model, x=…\)"
    with pytest.raises(UsageError, match=message):
        workload.call(abs)


def test_an_error_within_the_function_is_its_own() -> None:
    def run(model: object, x: int) -> object:
        raise TypeError(f"{model} of {x}")

    with pytest.raises(TypeError, match="of 1"):
        Workload(abs, {"x": 1}, run=run).call(abs)
