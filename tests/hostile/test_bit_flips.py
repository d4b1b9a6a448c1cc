"""A bit of a tensor that flips on a disk makes no comparison green, whatever the container."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.rerun import replay
from tensorcap.testing import assert_matches
from tensorcap_formats.check import check_archive as check
from tensorcap_formats.errors import ReadError
from tensorcap_formats.open import open_archive
from tests.hostile.containers import CONTAINERS, Container, available


def flip(container: Container, folder: Path, share: float, bit: int) -> None:
    """Flip a bit of the large tensor.

    If it is compressed, it is the longest piece without eight zeros, and the bit is in the middle of that.
    """
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if container.stored is None:
        piece = max((part for data in contents.values() for part in data.split(bytes(8))), key=len)
        start, size = 0.4, 0.2
    else:
        piece, start, size = container.stored, 0.0, 1.0
    file = next(path for path, data in contents.items() if piece in data)
    changed = bytearray(contents[file])
    changed[changed.index(piece) + int((start + size * share) * (len(piece) - 1))] ^= 1 << bit
    file.write_bytes(changed)


@pytest.mark.spec("ARC-38", "CMP-2", "CMP-70", "LCL-7")
@pytest.mark.parametrize("name", available())
def test_no_flipped_bit_is_green(name: str, tmp_path: Path) -> None:
    container = CONTAINERS[name]
    (tmp_path / "reference").mkdir()
    container.write(tmp_path / "reference")
    reference, target = (str(tmp_path / side / container.name) for side in ("reference", "target"))
    shutil.copytree(tmp_path / "reference", tmp_path / "target")
    whole = compare(reference, target, rtol=0, atol=0)
    assert {pair.status for pair in whole.pairs} == {"identical"}
    assert whole.exit_status == 0
    for share, bit in ((0.0, 0), (0.5, 2), (1.0, 3)):
        shutil.rmtree(tmp_path / "target")
        shutil.copytree(tmp_path / "reference", tmp_path / "target")
        flip(container, tmp_path / "target", share, bit)
        for sides in ((reference, target), (target, reference)):
            found = compare(*sides, rtol=0, atol=0)
            assert found.exit_status == 3 if container.is_sealed else found.exit_status in {1, 3}
            with pytest.raises(AssertionError):
                assert_matches(*sides, rtol=0, atol=0)
            if container.is_sealed:
                with pytest.raises(ReadError):
                    localize(*sides)


@pytest.mark.parametrize("name", available())
def test_check_ends_with_3_if_a_file_of_a_tensor_is_cut_short(name: str, tmp_path: Path) -> None:
    container = CONTAINERS[name]
    container.write(tmp_path)
    assert check_status(tmp_path / container.name) == 0
    largest = max(
        (path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size * 2 // 3])
    assert check_status(tmp_path / container.name) == 3


def check_status(path: Path) -> int:
    try:
        return check(str(path)).exit_status
    except ReadError as error:
        return error.exit_status


def damaged_copies(path: Path) -> Iterator[Path]:
    """Copies of an archive, each with a flipped bit in another of its tensors."""
    with open_archive(path) as archive:
        tensors = {archive.read(record).tobytes() for record in archive.records}
    content = path.read_bytes()
    for tensor in tensors:
        changed = bytearray(content)
        changed[changed.index(tensor) + len(tensor) // 2] ^= 4
        copy = path.with_name(f"damaged-{path.name}")
        copy.write_bytes(changed)
        yield copy


@pytest.mark.spec("RPL-210", "CMP-70")
def test_no_flipped_bit_is_believed_by_a_replay(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tensorcap.session import capture_workload
    from tensorcap.workload import Workload

    def make() -> Workload:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return Workload(
                torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))), (torch.ones(2, 16),)
            )

    right, wrong = make(), make()
    with torch.no_grad():
        wrong.model[1].bias += 1  # so that free runs are compared, of which the first layer is the same
    reference, target = tmp_path / "reference.h5", tmp_path / "target.h5"
    capture_workload(right, reference)
    capture_workload(wrong, target)
    assert [own.module for own in replay(reference, target, reference_model=right).bad] == ["1"]
    for damaged in damaged_copies(target):
        with pytest.raises(ReadError):
            replay(reference, damaged, reference_model=right)
    for damaged in damaged_copies(reference):
        with pytest.raises(ReadError):
            replay(damaged, target, reference_model=right)
        with pytest.raises(ReadError):
            replay(damaged, reference_model=right)
        with pytest.raises(ReadError):
            replay(damaged, target_model=wrong)
