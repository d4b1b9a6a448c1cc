"""Generation that is fed the tokens of another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tensorcap
from tensorcap.session import Recipe, capture_workload
from tensorcap_cli.main import main
from tensorcap_formats.errors import CaptureError, UsageError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": None,
}
T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": None,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text(json.dumps(LLAMA))
    return found


def capture(folder: Path, path: Path, **options: Any) -> Any:
    """Run once under capture; return the model, with random weights."""
    workload = Recipe(str(folder), {"random_weights": 0, **options}).build()
    capture_workload(workload, path, only="@root", inputs=False)
    return workload.model


def fed(path: Path, slot: str = "input.input_ids") -> list[Any]:
    """The token ids of each step."""
    with tensorcap.open_archive(path) as archive:
        steps = range(archive.run["steps"])
        return [archive.load(archive.get(f"{step}/@root/{slot}")).tolist() for step in steps]


def logits(path: Path) -> list[Any]:
    with tensorcap.open_archive(path) as archive:
        return [archive.load(archive.get(f"{s}/@root/output.logits")) for s in range(archive.run["steps"])]


@pytest.mark.spec("CAP-58")
def test_a_target_is_fed_the_tokens_of_the_reference_and_its_logits_are_its_own(
    folder: Path, tmp_path: Path
) -> None:
    reference, free, forced = (tmp_path / f"{name}.h5" for name in ("ref", "free", "forced"))
    prompt = {"input_ids": "1,2,3;9,8,7"}
    capture(folder, reference, max_new_tokens=6, **prompt)
    capture(folder, free, max_new_tokens=6, random_weights=1, **prompt)
    assert fed(free) != fed(reference)
    model = capture(folder, forced, random_weights=1, teacher_forced=str(reference), **prompt)
    assert fed(forced) == fed(reference)

    found = logits(forced)
    assert len(found) == 6
    ids = torch.tensor([[1, 2, 3], [9, 8, 7]])
    with torch.no_grad():  # without a cache, the whole sequence anew each time
        for step, one in enumerate(found):
            np.testing.assert_allclose(one[:, -1], model(ids, use_cache=False).logits[:, -1], atol=1e-5)
            if step < 5:
                ids = torch.cat([ids, torch.tensor(fed(reference)[step + 1])], 1)


@pytest.mark.spec("CAP-58")
def test_a_loop_by_hand_has_the_very_same_logits(folder: Path, tmp_path: Path) -> None:
    reference, forced = tmp_path / "ref.h5", tmp_path / "forced.h5"
    capture(folder, reference, max_new_tokens=4, input_ids="1,2,3")
    options = {"dtype": "bfloat16", "random_weights": 2}
    model = capture(folder, forced, teacher_forced=str(reference), input_ids="1,2,3", **options)
    cache: dict[str, Any] = {}
    with torch.no_grad():
        for step, ids in enumerate(fed(reference)):
            out = model(input_ids=torch.tensor(ids), use_cache=True, **cache)
            name = next(name for name in ("cache", "past_key_values") if name in out)
            cache = {name: out[name]}
            np.testing.assert_array_equal(logits(forced)[step][:, -1], out.logits[:, -1].float())


@pytest.mark.spec("CAP-58")
def test_left_padding_is_that_of_the_reference(folder: Path, tmp_path: Path) -> None:
    reference, forced = tmp_path / "ref.h5", tmp_path / "forced.h5"
    inputs = tmp_path / "inputs.npz"
    np.savez(
        inputs, input_ids=np.array([[0, 0, 5], [1, 2, 3]]), attention_mask=np.array([[0, 0, 1], [1, 1, 1]])
    )
    capture(folder, reference, max_new_tokens=3, inputs=str(inputs))
    capture(folder, forced, random_weights=1, teacher_forced=str(reference))  # the prompt is the reference's
    assert fed(forced) == fed(reference)
    assert fed(forced, "input.attention_mask")[2] == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]


@pytest.mark.spec("CAP-58")
def test_the_decoder_of_two_parts_is_fed_its_tokens(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps(T5))
    reference, free, forced = (tmp_path / f"{name}.h5" for name in ("ref", "free", "forced"))
    capture(folder, reference, max_new_tokens=5, input_ids="3,4,5")
    capture(folder, free, max_new_tokens=5, random_weights=3, input_ids="3,4,5")
    capture(folder, forced, random_weights=3, teacher_forced=str(reference))
    slot = "input.decoder_input_ids"
    assert fed(free, slot) != fed(reference, slot)
    assert fed(forced, slot) == fed(reference, slot)


@pytest.mark.spec("CAP-58")
@pytest.mark.parametrize(("count", "shared"), [(2, 2), (6, 4)], ids=["fewer", "more"])
def test_another_number_of_tokens_is_that_many_of_the_reference_and_then_its_own(
    folder: Path, tmp_path: Path, count: int, shared: int
) -> None:
    reference, forced = tmp_path / "ref.h5", tmp_path / "forced.h5"
    capture(folder, reference, max_new_tokens=4, input_ids="1,2")
    capture(folder, forced, max_new_tokens=count, random_weights=1, teacher_forced=str(reference))
    assert len(fed(forced)) == count
    assert fed(forced)[:shared] == fed(reference)[:shared]


def test_tokens_of_a_run_without_a_cache_are_the_last_ones_of_each_step(folder: Path, tmp_path: Path) -> None:
    reference, forced = tmp_path / "ref.h5", tmp_path / "forced.h5"
    model = Recipe(str(folder), {"random_weights": 0, "input_ids": "1"}).build().model
    with tensorcap.capture(model, reference, only="@root"):
        ids = torch.tensor([[1, 2, 3]])
        for token in (7, 8):
            model(ids, use_cache=False)
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
        model(ids, use_cache=False)
    capture(folder, forced, input_ids="1,2,3", teacher_forced=str(reference))
    assert fed(forced) == [[[1, 2, 3]], [[7]], [[8]]]


def test_a_run_that_ends_before_the_reference_did_is_reported(folder: Path, tmp_path: Path) -> None:
    reference, forced = tmp_path / "ref.h5", tmp_path / "forced.h5"
    capture(folder, reference, max_new_tokens=4, input_ids="1,2")
    third = fed(reference)[2][0][0]
    (folder / "generation_config.json").write_text("{}")
    workload = Recipe(str(folder), {"random_weights": 0, "teacher_forced": str(reference)}).build()
    workload.model.generation_config.eos_token_id = third
    with pytest.raises(CaptureError, match=r"the model ended after \d steps, where the reference took 4"):
        capture_workload(workload, forced)


@pytest.mark.parametrize(
    ("reference", "options", "message"),
    [
        pytest.param({}, {}, "has one step, expected those of a generation", id="one-forward"),
        pytest.param(
            {"max_new_tokens": 3}, {"input_ids": "1,2;3,4"}, "has 1 row, and 2 are to be run", id="rows"
        ),
        pytest.param({"max_new_tokens": 3}, {"input_ids": "1,3"}, "was given another input_ids", id="prompt"),
        pytest.param(
            {"max_new_tokens": 3},
            {"input_ids": "1,2", "config": {"vocab_size": 3}},
            "fed tokens that the model does not know, expected 0 to 2",
            id="vocabulary",
        ),
    ],
)
def test_a_reference_that_does_not_fit_is_refused_before_the_run(
    folder: Path, tmp_path: Path, reference: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "ref.h5"
    capture(folder, path, input_ids="1,2", **reference)
    with pytest.raises(UsageError, match=message):
        Recipe(str(folder), {"random_weights": 0, "teacher_forced": str(path), **options}).build()


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        pytest.param([2, 2, 1], "step 1 is given 2 tokens at once, expected one more", id="several-prompts"),
        pytest.param([2, 0], "step 1 is given 0 tokens at once", id="no-tokens"),
    ],
)
def test_a_run_that_was_no_generation_is_refused(
    folder: Path, tmp_path: Path, widths: list[int], message: str
) -> None:
    class Ids(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    path = tmp_path / "ref.h5"
    with tensorcap.capture(Ids(), path) as cap:
        for width in widths:
            cap._model(torch.tensor([[1, 2][:width]]))
    with pytest.raises(UsageError, match=message):
        Recipe(str(folder), {"random_weights": 0, "input_ids": "1,2", "teacher_forced": str(path)}).build()


def test_an_archive_without_token_ids_is_refused(folder: Path, path: Path, small: Any) -> None:
    with tensorcap.capture(small, path):
        small(torch.ones(1, 4))
    with pytest.raises(UsageError, match="holds no token ids that the model was given"):
        Recipe(str(folder), {"random_weights": 0, "input_ids": "1", "teacher_forced": str(path)}).build()


def test_a_reference_that_stopped_at_its_limit_is_refused(folder: Path, path: Path) -> None:
    workload = Recipe(str(folder), {"random_weights": 0, "input_ids": "1,2", "max_new_tokens": 3}).build()
    capture_workload(workload, path, max_bytes=2000)
    with pytest.raises(UsageError, match="stopped at its limit of bytes"):
        Recipe(str(folder), {"random_weights": 0, "teacher_forced": str(path)}).build()


def test_a_forced_run_is_repeated_with_the_tokens_that_it_was_fed(folder: Path, tmp_path: Path) -> None:
    reference, forced, again = (tmp_path / f"{name}.h5" for name in ("ref", "forced", "again"))
    capture(folder, reference, max_new_tokens=4, input_ids="1,2")
    line = ["capture", "torch", str(folder), "--random-weights", "1", "--teacher-forced", str(reference)]
    CliRunner().invoke(main, [*line, "-o", str(forced)], catch_exceptions=False)
    tokens = fed(reference)
    reference.unlink()
    done = CliRunner().invoke(
        main, ["capture", "torch", "--like", str(forced), "-o", str(again)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert "4 steps: 1 prefill, 3 decode" in done.stderr
    assert fed(again) == fed(forced) == tokens


def test_a_forced_recipe_keeps_only_a_max_new_tokens_that_is_passed() -> None:
    recipe = Recipe("m", {"max_new_tokens": 20}).changed(teacher_forced="ref.h5", dtype="bfloat16")
    assert recipe.options == {"teacher_forced": "ref.h5", "dtype": "bfloat16"}
    assert Recipe("m", {"max_new_tokens": 20}).changed(teacher_forced="r", max_new_tokens=3).options == {
        "teacher_forced": "r",
        "max_new_tokens": 3,
    }
