"""What the ports say of themselves, checked on the values that both sides gave, with numpy alone."""

from __future__ import annotations

from tests.alignment.ports.capturing import Run, is_close, outputs


def test_every_output_record_is_named_once(run: Run) -> None:
    truth, originals = run.truth, run.truth.originals()
    for i, archive in enumerate((run.reference, run.target)):
        demanded = [key for pair in truth.pairs for sides in pair.expanded() for key in sides[i]]
        further = {key for pair in truth.extras for sides in pair.expanded() for key in sides[i]}
        present = outputs(archive).keys()
        alike = {key for key, original in originals.items() if key in present and key != original}
        lone = truth.lone("target" if i else "reference")
        assert len(set(demanded)) == len(demanded)
        assert set(demanded) | further | alike | lone == present
        assert not (set(demanded) | further) & lone
        assert not alike & (set(demanded) | lone)


def test_every_pair_is_equal_to_rounding_after_its_conversion(run: Run) -> None:
    reference, count = outputs(run.reference), 0
    for pair in (*run.truth.pairs, *run.truth.extras, *run.truth.given):
        for ones, others in pair.expanded():
            made = pair.converted([run.target.read(run.target.get(key)) for key in others])
            for key, array in zip(ones, made, strict=True):
                assert is_close(reference[key], array), (key, others)
                count += 1
    assert count > 35


def test_what_is_said_to_be_alike_is(run: Run) -> None:
    sides = outputs(run.reference), outputs(run.target)
    for key, original in run.truth.originals().items():
        assert any(
            key in side and side[key].tobytes() == side[original].tobytes() for side in sides
        ) or not any(key in side for side in sides), key


def test_nothing_else_is_true(run: Run) -> None:
    """No tensor is that of another place, as it is or with two axes exchanged, unless the truth says so."""
    reference, target = outputs(run.reference), outputs(run.target)
    known = {
        (reference[key].tobytes(), target[other].tobytes())
        for pair in (*run.truth.pairs, *run.truth.extras)
        for ones, others in pair.expanded()
        for key in ones
        for other in others
    }
    for other, array in target.items():
        turned = [array, array[None], *(array.swapaxes(i, i + 1) for i in range(array.ndim - 1))]
        for key, own in reference.items():
            if any(is_close(own, one) for one in turned):
                assert (own.tobytes(), array.tobytes()) in known, (key, other)
