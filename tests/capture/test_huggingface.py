"""Workloads of Hugging Face models: tiny, made here, nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tensorcap
from tensorcap.session import Recipe, capture_workload, parse_setting
from tensorcap.workload import archived_inputs
from tensorcap_formats.errors import ReadError, UsageError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with config.json and nothing else."""
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text(json.dumps(LLAMA))
    return found


def build(folder: Path, **options: Any) -> Any:
    return Recipe(str(folder), {"input_ids": "1,2,3", **options}).build()


def test_a_configuration_alone_is_enough_for_random_weights(folder: Path, path: Path) -> None:
    cap = capture_workload(build(folder, random_weights=0), path)
    assert cap.summary is not None
    with tensorcap.open_archive(path) as archive:
        assert archive.run["dtype"] == "float32"  # whatever the configuration says of a checkpoint
        assert archive.run["model"]["config"]["hidden_size"] == 32
        assert archive.load(archive.get("0/@root/input.input_ids")).tolist() == [[1, 2, 3]]
        assert archive.values["0/@root/input.use_cache"] is False
        assert archive.get("0/@root/output.logits").shape == (1, 3, 64)


def test_random_weights_are_those_of_the_seed(folder: Path) -> None:
    one, again, other = (build(folder, random_weights=seed).model.lm_head.weight for seed in (7, 7, 8))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_the_twin_has_rounded_weights_and_exact_rotary_tables(folder: Path, tmp_path: Path) -> None:
    reference = build(folder, random_weights=0).model
    twin = build(folder, random_weights=0, dtype="bfloat16").model
    for (name, weight), (_, rounded) in zip(
        reference.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert rounded.dtype == torch.bfloat16, name
        assert torch.equal(weight.to(torch.bfloat16), rounded), name
    # 10000^(-i/8) for i = 0, 2, 4, 6 in float32, for heads of 8
    expected = np.array([1.0, 0.1, 0.01, 0.001], np.float32)
    np.testing.assert_allclose(twin.model.rotary_emb.inv_freq.numpy(), expected, rtol=1e-6)
    assert twin.model.rotary_emb.inv_freq.dtype == torch.float32

    reference.save_pretrained(tmp_path / "saved")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    for one, two in (
        (loaded.state_dict(), twin.state_dict()),
        (dict(loaded.named_buffers()), dict(twin.named_buffers())),
    ):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) and one[name].dtype == two[name].dtype for name in one)


def test_weights_of_a_folder_are_loaded_in_the_dtype_asked_for(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    build(folder, random_weights=0, dtype="float16").model.save_pretrained(saved)
    assert build(saved).model.dtype == torch.float16
    assert build(saved, dtype="float32").model.dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True], ids=["own-head", "tied-head"])
@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        pytest.param({}, {}, None, id="as-saved"),
        pytest.param({}, {"num_hidden_layers": 1}, None, id="fewer-layers"),
        pytest.param({}, {"config": {"num_hidden_layers": 1}}, None, id="fewer-layers-by-the-configuration"),
        pytest.param(
            {},
            {"config": {"num_hidden_layers": 4}},
            "--config num_hidden_layers is 4, expected 1 to 3",
            id="more-layers",
        ),
        pytest.param(
            {"num_hidden_layers": 4},
            {},
            r"lacks weights of LlamaForCausalLM: model\.layers\.3\.input_layernorm\.weight, .* and 5 more",
            id="missing",
        ),
        pytest.param(
            {"intermediate_size": 40},
            {"num_hidden_layers": 1},
            r"has, in another shape, weights of LlamaForCausalLM: model\.layers\.0\.mlp\.down_proj\.weight, ",
            id="another-shape",
        ),
    ],
)
def test_weights_that_a_checkpoint_lacks_are_never_drawn(
    folder: Path, tmp_path: Path, tied: bool, change: Any, options: Any, message: str | None
) -> None:
    saved = tmp_path / "saved"
    build(folder, random_weights=0, config={"tie_word_embeddings": tied}).model.save_pretrained(saved)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, **change}))
    if message is None:
        build(saved, **options)
        return
    with pytest.raises(UsageError, match=message):
        build(saved, **options)


def test_layer_counts_of_the_configuration_cut_the_lists_of_layers_too(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build(tmp_path, random_weights=0, config={"num_hidden_layers": 2}).model
    assert model.config.layer_types == ["full_attention"] * 2


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no weights can be loaded: .*no file named") as caught:
        build(folder)
    assert caught.value.hint == "Draw weights with --random-weights 0."


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_damaged_file_of_weights_cannot_be_read(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"nonsense")
    with pytest.raises(ReadError, match="a file of weights is damaged") as caught:
        build(folder)
    assert caught.value.exit_status == 3


@pytest.mark.parametrize(
    ("options", "check"),
    [
        pytest.param({"num_hidden_layers": 1}, lambda m: len(m.model.layers) == 1, id="layers"),
        pytest.param(
            {"config": {"rms_norm_eps": 0.5}}, lambda m: m.model.norm.variance_epsilon == 0.5, id="key"
        ),
        pytest.param(
            {"config": {"rope_parameters.rope_theta": 16.0}},
            lambda m: np.allclose(m.model.rotary_emb.inv_freq, [1, 0.5, 0.25, 0.125]),
            id="dotted-key",
        ),
        pytest.param(
            {"config": {"attn_implementation": "eager"}},
            lambda m: m.config._attn_implementation == "eager",
            id="attention",
        ),
    ],
)
def test_options_change_the_configuration(folder: Path, options: dict[str, Any], check: Any) -> None:
    assert check(build(folder, random_weights=0, **options).model)


def test_a_shorter_model_has_shorter_lists_of_layer_types(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build(tmp_path, random_weights=0, num_hidden_layers=2).model
    assert model.config.layer_types == ["full_attention"] * 2


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        pytest.param(
            {"config": {"hiden_size": 1}},
            "has no 'hiden_size'",
            "Did you mean 'hidden_size' or 'hidden_act'?",
            id="unknown-key",
        ),
        pytest.param(
            {"config": {"rope_parameters.x": 1}}, "has no 'rope_parameters.x'", None, id="unknown-inner-key"
        ),
        pytest.param({"config": {"hidden_size.x": 1}}, "holds no further options", None, id="not-a-group"),
        pytest.param({"input_ids": "1,2;3"}, "expected numbers such as", None, id="ragged-ids"),
        pytest.param({"input_ids": "1,x"}, "expected numbers such as", None, id="ids-that-are-none"),
        pytest.param({"input_ids": "1,,2"}, "expected numbers such as", None, id="ids-with-a-gap"),
        pytest.param({"input_ids": "1,2,"}, "expected numbers such as", None, id="ids-with-an-end"),
        pytest.param({"input_ids": "1-2"}, "expected numbers such as", None, id="a-range"),
        pytest.param({"input_ids": "1" * 30}, "expected numbers from 0 to 63", None, id="a-huge-id"),
        pytest.param({"input_ids": "64"}, "expected numbers from 0 to 63", None, id="ids-out-of-range"),
        pytest.param({"input_ids": None}, "expected --prompt, --input-ids or --inputs", None, id="no-inputs"),
        pytest.param({"prompt": "a"}, "--prompt and --input-ids exclude each other", None, id="two-inputs"),
        pytest.param({"device": "nosuch"}, "device 'nosuch' cannot be used: ", None, id="no-such-device"),
        pytest.param(
            {"config": {"hidden_act": "nosuch"}},
            "no model can be made with hidden_act=nosuch: KeyError: 'nosuch'",
            None,
            id="no-such-activation",
        ),
        pytest.param(
            {"config": {"hidden_size": "abc"}},
            "--config hidden_size=abc: Validation error for field 'hidden_size'",
            None,
            id="wrong-type",
        ),
        pytest.param(
            {"config": {"num_hidden_layers": "abc"}}, "is 'abc', expected 1 to 3", None, id="layers-as-text"
        ),
        pytest.param({"dtype": "int8"}, "is no floating dtype", None, id="dtype"),
        pytest.param(
            {"random_weights": None, "num_hidden_layers": 4}, "expected 1 to 3", None, id="too-many-layers"
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    folder: Path, options: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build(folder, **{"random_weights": 0, **options})
    if hint is not None:
        assert caught.value.hint == hint


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a folder without config\.json"):
        build(tmp_path, random_weights=0)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        pytest.param('"hidden_size": "wide"', "Field .hidden_size. expected int", id="type"),
        pytest.param('"rope_parameters": 3', "", id="no-mapping"),
        pytest.param('"hidden_size": 31, "num_attention_heads": 3', "is not a multiple", id="contradiction"),
        pytest.param('"architectures"', "", id="no-json"),
    ],
)
def test_a_configuration_that_its_class_refuses_is_a_line(tmp_path: Path, members: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", {members}}}', encoding="utf-8")
    with pytest.raises(UsageError, match=f"no Hugging Face model can be read there: .*{reason}") as caught:
        build(tmp_path, random_weights=0)
    assert "\n" not in str(caught.value)


def test_a_model_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UsageError, match="no Hugging Face model can be read there"):
        build(tmp_path / "absent", random_weights=0)


def test_generation_is_one_step_a_token_and_keeps_what_it_was_given(folder: Path, path: Path) -> None:
    workload = build(folder, random_weights=0, max_new_tokens=3)
    capture_workload(workload, path, only="lm_head", inputs=False)
    with tensorcap.open_archive(path) as archive:
        assert archive.run["steps"] == 3
        assert [r.key.text for r in archive.records if r.key.site == "lm_head"] == [
            "0/lm_head/output",
            "1/lm_head/output",
            "2/lm_head/output",
        ]
        assert archive.records[0].key.text == "0/@root/given.input_ids"
        found = archived_inputs(archive)
        assert list(found) == ["input_ids"]
        assert found["input_ids"].bits.tolist() == [[1, 2, 3]]
        # greedy: the next input is the argmax of the logits before
        for step in (0, 1):
            logits = archive.load(archive.get(f"{step}/lm_head/output"))
            chosen = archive.load(archive.get(f"{step + 1}/@root/input.input_ids"))
            assert chosen.tolist() == [[int(logits[0, -1].argmax())]]


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "h5"])
def test_inputs_come_from_a_file_by_argument_name(folder: Path, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"inputs.{suffix}"
    arrays: dict[str, Any] = {"input_ids": np.array([[4, 5]]), "attention_mask": np.array([[1, 1]])}
    if suffix == "npz":
        np.savez(file, **arrays)
    elif suffix == "safetensors":
        from safetensors.numpy import save_file

        save_file(arrays, file)
    else:
        import h5py

        with h5py.File(file, "w") as h5:
            for name, array in arrays.items():
                h5[name] = array
    workload = build(folder, random_weights=0, input_ids=None, inputs=str(file))
    assert workload.inputs["input_ids"].tolist() == [[4, 5]]
    assert workload.inputs["attention_mask"].tolist() == [[1, 1]]
    np.savez(tmp_path / "bad.npz", inputs_ids=np.array([[1]]))
    with pytest.raises(UsageError, match="has no argument 'inputs_ids'"):
        build(folder, random_weights=0, input_ids=None, inputs=str(tmp_path / "bad.npz"))


def test_a_prompt_goes_through_the_tokenizer_of_the_folder(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"sky": 4, "the": 5, "?": 6}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]  # theirs
    wrapped.save_pretrained(folder)
    workload = build(folder, random_weights=0, input_ids=None, prompt="the blue sky")
    assert workload.inputs["input_ids"].tolist() == [[5, 6, 4]]
    assert workload.inputs["attention_mask"].tolist() == [[1, 1, 1]]
    assert "token_type_ids" not in workload.inputs


def test_a_decoder_gets_a_first_token(tmp_path: Path) -> None:
    config = {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "vocab_size": 64,
        "d_model": 32,
    }
    config |= {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    workload = build(tmp_path, random_weights=0, num_hidden_layers=1)
    assert workload.inputs["decoder_input_ids"].tolist() == [[5]]
    assert (len(workload.model.encoder.block), len(workload.model.decoder.block)) == (1, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a=1", ("a", 1), id="number"),
        pytest.param("a.b=true", ("a.b", True), id="bool"),
        pytest.param("a=gelu", ("a", "gelu"), id="text"),
        pytest.param("a=b=c", ("a", "b=c"), id="text-with-equals"),
    ],
)
def test_a_setting_is_json_or_text(text: str, expected: tuple[str, Any]) -> None:
    assert parse_setting(text) == expected


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="expected key=value"):
        parse_setting("hidden_size")
