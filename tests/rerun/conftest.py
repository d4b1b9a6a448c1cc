from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.recording import Slot, Substitution
from tensorcap.session import Capture
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.support.archives import write_archive

Archived = Callable[..., Archive]


@pytest.fixture
def archived(tmp_path: Path) -> Archived:
    """An archive of these tensors: by key text, or what a model computes of arguments."""

    def make(what: nn.Module | dict[str, Array], *args: Any, **kwargs: Any) -> Archive:
        path = tmp_path / "ref.h5"
        if isinstance(what, nn.Module):
            with torch.no_grad(), tensorcap.capture(what, path):
                what(*args, **kwargs)
        else:
            write_archive(path, what)
        return open_archive(path)

    return make


@pytest.fixture
def substituted(tmp_path: Path) -> Callable[..., tuple[Any, Capture]]:
    """What a model computes under a substitution, and the capture of it."""

    def run(model: nn.Module, substitution: Substitution, *args: Any, **kwargs: Any) -> tuple[Any, Capture]:
        with torch.no_grad():
            cap = tensorcap.capture(model, tmp_path / "out.h5", substitution=substitution)
            with cap:
                result = model(*args, **kwargs)
        return result, cap

    return run


def slot_of(substitution: Substitution, site: str, slot: str) -> Slot:
    return next(found for found in substitution.slots if (found.site, found.slot) == (site, slot))
