from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.align.ports.capturing import Run

GAPS = {  # what `propose` does not do yet
    "test_every_pair_is_found[llama]": "a layer that is the sum of two results",
    "test_every_pair_is_found[bert]": "a second result of the whole model",
    "test_every_pair_is_found[t5]": "results of layers within a scan",
    "test_no_pair_is_wrong[llama]": "an argument whose values contradict",
    "test_no_pair_is_wrong[whisper]": "an argument whose values contradict",
    "test_every_link_is_equal_to_rounding_under_its_steps[qwen3_moe]": "arguments take the steps of results",
    "test_every_link_is_equal_to_rounding_under_its_steps[bert]": "arguments of unlike modules are paired",
    "test_every_link_is_equal_to_rounding_under_its_steps[t5]": "arguments of unlike modules are paired",
    "test_what_is_left_over_is_what_has_no_counterpart[t5-reference]": "results of layers within a scan",
    "test_what_is_left_over_is_what_has_no_counterpart[whisper-reference]": "an attention's second result",
}
PORTS = ("llama", "qwen3_moe", "gpt2", "gemma3", "bert", "t5", "whisper", "vit")


@pytest.fixture(scope="session", params=PORTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The archives of a model and of its port."""
    pytest.importorskip("transformers")
    from tests.align.ports.capturing import captured

    port = import_module(f"tests.align.ports.{request.param}").PORT
    return captured(port, tmp_path_factory.mktemp(request.param))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name in GAPS:
            item.add_marker(pytest.mark.xfail(strict=True, reason=GAPS[item.name]))
