from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.align.ports.capturing import Run

_TOLD = "the doubt is not told"
GAPS = {  # what `propose` does not do yet
    "test_what_looks_right_and_what_is_right_are_kept_apart[twins]": _TOLD,
    "test_what_looks_right_and_what_is_right_are_kept_apart[scaled]": _TOLD,
    "test_what_looks_right_and_what_is_right_are_kept_apart[symmetric]": _TOLD,
    "test_what_looks_right_and_what_is_right_are_kept_apart[fused_backwards]": _TOLD,
    "test_what_looks_right_and_what_is_right_are_kept_apart[square_weight]": "parameters are not paired",
    "test_what_looks_right_and_what_is_right_are_kept_apart[transposed_weights]": "parameters are not paired",
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
