"""What models are given and give as token models, and the runs that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from tensorcap.adapters import adapter_for
from tensorcap.equivalence.token_runs import (
    Prompt,
    SideRuns,
    TokenRun,
    forced_run,
    greedy_run,
    is_causal,
    prompt_run,
    require_prompts,
)
from tensorcap.workload import TokenModel, Workload
from tensorcap_formats.errors import ReadError, UsageError

IDS = torch.tensor([[5, 9, 3, 11, 2], [7, 7, 1, 0, 4]])


class LastRow(nn.Module):
    """A causal model of its own arguments: a sum over the prefix, and logits of the last position alone."""

    def __init__(self, vocabulary: int = 16, *, all_rows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(vocabulary, 8)
        self.head = nn.Linear(8, vocabulary)
        self.all_rows = all_rows
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Any:
        self.seen.append((input_ids.tolist(), attention_mask.tolist(), position_ids.tolist()))
        x = (self.embed(input_ids) * (1 + position_ids[..., None])).cumsum(1)
        logits = self.head(x.tanh())
        return (logits if self.all_rows else logits[:, -1:],)


def inputs() -> dict[str, Any]:
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    return {"input_ids": IDS, "attention_mask": mask, "position_ids": torch.arange(5).expand(2, 5)}


def token_model(model: Any, arguments: Any = None) -> TokenModel:
    workload = Workload(model.eval(), inputs() if arguments is None else arguments)
    return adapter_for(model).token_model(workload)


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=16,
            initializer_range=0.3,
            **{"eos_token_id": None, **options},
        )
    )
    return model.eval()


@pytest.mark.spec("EQL-1")
def test_a_model_of_its_last_position_is_given_each_prefix() -> None:
    last, whole = LastRow(), LastRow(all_rows=True)
    tokens = [5, 9, 3, 11]
    rows = token_model(last).rows(tokens, 1)
    np.testing.assert_allclose(rows, token_model(whole).rows(tokens, 1), atol=1e-6)
    assert rows.shape == (3, 16)
    assert [len(ids[0]) for ids, _, _ in last.seen] == [4, 2, 3]
    assert len(whole.seen) == 1
    assert last.seen[1] == ([[5, 9]], [[1, 1]], [[0, 1]])


@pytest.mark.spec("EQL-1")
def test_prompts_are_the_workloads_own_without_what_its_mask_leaves_out() -> None:
    assert token_model(LastRow()).prompts == ((5, 9, 3, 11, 2), (1, 0, 4))
    positional = Workload(LastRow(), tuple(inputs().values()))
    assert adapter_for(positional.model).token_model(positional).prompts[1] == (1, 0, 4)


@pytest.mark.spec("EQL-2")
def test_a_hugging_face_model_goes_on_through_its_cache() -> None:
    model = llama()
    lengths: list[int] = []
    workload = Workload(model, {"input_ids": IDS, "use_cache": False})
    one = adapter_for(model).token_model(workload)
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    run = greedy_run(one, Prompt.of_tokens([5, 9, 3]), 4, vocabulary=16)
    hook.remove()
    assert lengths == [3, 1, 1, 1]
    ids = torch.tensor([[5, 9, 3, *run.tokens]])
    with torch.no_grad():
        rows = model(ids).logits[0, 2:-1].numpy()
    np.testing.assert_allclose(run.logits, rows, atol=1e-5)
    assert run.tokens == tuple(rows.argmax(axis=1).tolist())
    assert one.vocabulary == 16


@pytest.mark.spec("EQL-3")
def test_given_tokens_are_fed_whatever_the_model_would_choose() -> None:
    model = llama()
    one = token_model(model, {"input_ids": IDS})
    own = greedy_run(one, Prompt.of_tokens([5, 9, 3]), 4, vocabulary=16)
    other = tuple((token + 1) % 16 for token in own.tokens)
    run = forced_run(one, own.prompt, other)
    with torch.no_grad():
        rows = model(torch.tensor([[5, 9, 3, *other]])).logits[0, 2:-1].numpy()
    np.testing.assert_allclose(run.logits, rows, atol=1e-5)
    assert run.tokens == other


@pytest.mark.spec("EQL-3")
def test_generation_ends_with_a_text() -> None:
    free = greedy_run(token_model(llama(), {"input_ids": IDS}), Prompt.of_tokens([5, 9, 3]), 6, vocabulary=16)
    ending = free.tokens[2]
    model = token_model(llama(eos_token_id=ending), {"input_ids": IDS})
    run = greedy_run(model, Prompt.of_tokens([5, 9, 3]), 6, vocabulary=16)
    assert run.tokens == free.tokens[: free.tokens.index(ending) + 1]
    padded = greedy_run(token_model(LastRow()), Prompt.of_tokens([5, 9]), 3, vocabulary=4)
    assert max(padded.tokens) < 4


@pytest.mark.spec("EQL-4")
def test_an_encoder_is_told_from_a_decoder() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    encoder = token_model(BertForMaskedLM(config), {"input_ids": IDS, "token_type_ids": torch.ones_like(IDS)})
    prompt = Prompt.of_tokens([5, 9, 3])
    assert not is_causal(encoder, prompt)
    for decoder in (token_model(llama(), {"input_ids": IDS}), token_model(LastRow())):
        assert is_causal(decoder, prompt)
        assert is_causal(decoder, Prompt.of_tokens([5, 5]))
    run = prompt_run(encoder, prompt, vocabulary=16)
    assert run.logits.shape == (3, 16)
    assert run.tokens == tuple(run.logits.argmax(axis=1).tolist())


class Returns(nn.Module):
    """Returns what it is told to."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, input_ids: Tensor) -> Any:
        return self.result


@pytest.mark.spec("EQL-5")
@pytest.mark.parametrize(
    ("result", "message"),
    [
        pytest.param("text", "Returns: returned str, expected logits", id="text"),
        pytest.param(torch.zeros(1, 3, dtype=torch.int64), "a tensor of 2 axes and dtype int64", id="tokens"),
        pytest.param(torch.zeros(1, 7, 16), "logits \\[1, 7, 16\\] for 3 tokens", id="padded"),
        pytest.param(torch.zeros(2, 3, 16), "logits \\[2, 3, 16\\] for 3 tokens", id="rows"),
        pytest.param({"hidden": torch.zeros(1, 3, 16)}, "returned dict, expected logits", id="hidden"),
        pytest.param((), "returned tuple, expected logits", id="nothing"),
    ],
)
def test_a_model_without_logits_is_refused(result: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        token_model(Returns(result), {"input_ids": IDS}).begin([5, 9, 3])


@pytest.mark.spec("EQL-5")
def test_hidden_states_are_no_logits_of_a_vocabulary() -> None:
    model = llama()
    model.lm_head = nn.Identity()
    model.config.vocab_size = 64
    with pytest.raises(UsageError, match="returned 32 numbers a token, expected logits of the 64 tokens"):
        token_model(model, {"input_ids": IDS}).begin([5, 9, 3])


@pytest.mark.spec("EQL-5")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"x": torch.zeros(2, 3)}, "expected one input of token ids \\[rows, tokens\\], found x", id="x"
        ),
        pytest.param(
            {"input_ids": IDS, "pixels": torch.zeros(1)}, "its input 'pixels' cannot be made", id="pixels"
        ),
        pytest.param({"a": IDS, "b": IDS}, "expected one input of token ids", id="two"),
    ],
)
def test_inputs_that_cannot_be_made_for_other_tokens_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        token_model(LastRow(), arguments)


@pytest.mark.spec("EQL-6")
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        pytest.param([], "no prompts, expected at least one", id="none"),
        pytest.param([Prompt("", ())], "prompt 1 \\(''\\): has no tokens", id="empty"),
        pytest.param(
            [Prompt("a", (1,)), Prompt("b", (2, 16))], "prompt 2 \\('b'\\): token 16, .* 0 to 15", id="far"
        ),
        pytest.param([Prompt("a", (-1,))], "token -1, expected numbers from 0", id="negative"),
    ],
)
def test_prompts_that_no_model_can_be_given_are_refused(prompts: list[Prompt], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require_prompts(prompts, 16)


def test_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    run = TokenRun(Prompt("é", (1, 2)), (3, 4), np.arange(6, dtype=np.float64).reshape(2, 3))
    SideRuns((run,), None, False, "a CPU").write(tmp_path / "a.npz")
    back = SideRuns.read(tmp_path / "a.npz")
    assert (back.vocabulary, back.generates, back.device) == (None, False, "a CPU")
    assert (back.runs[0].prompt, back.runs[0].tokens) == (run.prompt, run.tokens)
    assert back.runs[0].logits.dtype == np.float64
    assert np.array_equal(back.runs[0].logits, run.logits)
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    for name in ("b.npz", "none.npz"):
        with pytest.raises(ReadError, match="holds no runs of prompts"):
            SideRuns.read(tmp_path / name)
