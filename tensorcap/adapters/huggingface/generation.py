"""Greedy generation by a Hugging Face model, free or with the tokens of another run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from tensorcap.adapters.torch.tensors import from_stored
from tensorcap.wording import conjugated, counted
from tensorcap.workload import StoredInput, archived_inputs
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import CaptureError, UsageError
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal."""
    from transformers.utils import logging

    log: Any = logging  # its functions are not annotated
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


_TOKENS: Final = (
    "input.decoder_input_ids",
    "input.input_ids",
)  # the former is the argument of an encoder-decoder model


class Generation:
    """Greedy generation: one forward, and so one step, a token.

    Attributes:
        max_new_tokens: How many tokens are generated; the last one is not fed.
        forced: Tokens `(step, row)` to feed in place of the model's own; after them it chooses itself.
    """

    def __init__(self, max_new_tokens: int, forced: torch.Tensor | None = None) -> None:
        self.max_new_tokens = max_new_tokens
        self.forced = forced

    def __call__(self, model: Any, **inputs: torch.Tensor) -> None:
        """Generate.

        Raises:
            CaptureError: The model ended before all forced tokens were fed.
        """
        options: dict[str, Any] = {}
        if self.forced is not None:
            options["logits_processor"] = [forcing := _Forcing(self.forced)]
        with quiet():
            model.generate(
                **inputs, max_new_tokens=self.max_new_tokens, do_sample=False, num_beams=1, **options
            )
        if self.forced is not None:
            wanted = min(len(self.forced), self.max_new_tokens - 1)
            if forcing.count <= wanted:
                raise CaptureError(
                    f"the model ended after {forcing.count} steps, where the reference took {wanted + 1}",
                    hint="Do both know the same eos_token_id?",
                )


class _Forcing:
    """A logits processor that gives the next token of a list all the probability."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step, self.count = self.count, self.count + 1
        if step >= len(self._tokens):
            return scores
        tokens = self._tokens[step].to(scores.device)
        return torch.full_like(scores, float("-inf")).scatter(1, tokens[:, None], 0.0)


def tokens_fed(archive: Archive, prompt: Mapping[str, torch.Tensor], vocabulary: int | None) -> torch.Tensor:
    """The tokens that a run fed after its prompt.

    Args:
        archive: The run.
        prompt: The prompt by argument; it must be the prompt of that run.
        vocabulary: How many tokens the model knows; None if unknown.

    Returns:
        Token ids `(step, row)`, from step 1 on.

    Raises:
        UsageError: The run fed no tokens one by one, or those of another prompt.
    """
    where = archive.path
    steps = _ids_of_steps(archive)
    if archive.info.stopped:
        raise UsageError(f"{where}: holds not all of its tokens, since it stopped at its limit of bytes")
    if not steps:
        raise UsageError(f"{where}: holds no token ids that the model was given")
    if len(steps) == 1:
        raise UsageError(
            f"{where}: has one step, expected those of a generation", hint="Capture it with --max-new-tokens."
        )
    _check_prompt(archive, prompt)
    fed = []
    for step, (before, record) in enumerate(itertools.pairwise(steps), 1):
        if record.shape[1] not in (1, before.shape[1] + 1):  # the latter without a cache
            raise UsageError(
                f"{where}: step {step} is given {record.shape[1]} tokens at once, expected one more",
                hint="It must be a run of one generation, with one token a step.",
            )
        fed.append(from_stored(archive.read(record), record.dtype)[:, -1].long())
    tokens = torch.stack(fed)
    if vocabulary is not None and not bool(((tokens >= 0) & (tokens < vocabulary)).all()):
        raise UsageError(f"{where}: fed tokens that the model does not know, expected 0 to {vocabulary - 1}")
    return tokens


def _ids_of_steps(archive: Archive) -> list[Record]:
    """The records of the token ids of each step, from 0 on without a gap; none if the run has no ids."""
    for slot in _TOKENS:
        by_step = {
            record.key.step: record
            for record in archive.records
            if (record.key.site, record.key.slot, record.key.call, record.key.rank) == (ROOT_SITE, slot, 0, 0)
        }
        if by_step:
            rows = {record.shape[0] if len(record.shape) == 2 else None for record in by_step.values()}
            steps = range(len(by_step) if archive.info.steps is None else archive.info.steps)
            if by_step.keys() != set(steps) or len(rows) > 1 or None in rows:
                raise UsageError(f"{archive.path}: is no run of one generation, with the same rows each step")
            return [by_step[step] for step in steps]
    return []


def _check_prompt(archive: Archive, prompt: Mapping[str, torch.Tensor]) -> None:
    before: dict[str, StoredInput] = archived_inputs(archive)
    for name, value in prompt.items():
        if name not in before or value.is_floating_point():
            continue
        kept = from_stored(*before[name])
        if len(kept) != len(value):
            rows = f"{counted(len(kept), 'row')}, and {len(value)} {conjugated(len(value), 'are')}"
            raise UsageError(f"{archive.path}: has {rows} to be run")
        if not torch.equal(kept, value.to(kept.dtype)):
            raise UsageError(
                f"{archive.path}: was given another {name}",
                hint="Leave the prompt out; it has that of the archive.",
            )
