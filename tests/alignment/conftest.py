from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.alignment.ports.capturing import Run

PORTS = ("llama", "qwen3_moe", "gpt2", "gemma3", "bert", "t5", "whisper", "vit")


@pytest.fixture(scope="session", params=PORTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The archives of a model and of its port."""
    pytest.importorskip("transformers")
    from tests.alignment.ports.capturing import captured

    port = import_module(f"tests.alignment.ports.{request.param}").PORT
    return captured(port, tmp_path_factory.mktemp(request.param))
