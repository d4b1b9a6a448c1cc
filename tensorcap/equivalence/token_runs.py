"""What a model makes of prompts: greedy tokens, or the logits before given tokens (teacher forcing).

A run is kept in an `.npz` file, so that sides run one after the other, each alone in memory, and a port on
ranks in processes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np

from tensorcap.workload import TokenModel
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError, UsageError, abbreviate
from tensorcap_formats.output_path import build_beside, put_in_place

SMOKE_PROMPTS: Final = (  # the method's own
    "The capital of France is",
    "Water freezes at a temperature of",
    "The speed of light is approximately",
    "In machine learning, gradient descent",
    "The largest planet in our solar system",
    "def fibonacci(n):\n    if n <= 1:",
    "The theory of relativity states that",
    "Photosynthesis is the process by which",
    "The human genome contains approximately",
    "In quantum mechanics, the uncertainty principle",
)
FORCED_PROMPTS: Final = SMOKE_PROMPTS[:3]
# Relative. With another token behind, shapes and so rounding are the same; a model that reads it changes more
_CAUSAL: Final = 1e-5


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to begin with.

    Attributes:
        text: As a person reads it: the text, or its tokens.
        tokens: Token ids, at least one.
    """

    text: str
    tokens: tuple[int, ...]

    @classmethod
    def of_tokens(cls, tokens: Sequence[int]) -> Prompt:
        """A prompt of which only the tokens are known.

        Example:
            >>> Prompt.of_tokens([3, 14]).text
            'tokens 3 14'
        """
        return cls(f"tokens {' '.join(map(str, tokens))}", tuple(tokens))


@dataclass(frozen=True, slots=True)
class TokenRun:
    """What a model made of one prompt.

    Attributes:
        prompt: The prompt.
        tokens: The tokens that logits are of, each position's first choice or the one that was fed there.
        logits: [len(tokens), V] float32 or float64, at each position before its token is known.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    logits: Array


def require_prompts(prompts: Sequence[Prompt], vocabulary: int | None) -> None:
    """Refuse prompts that no model can be given.

    Raises:
        UsageError: There are none, one is empty, or it has tokens that the vocabulary lacks.
    """
    if not prompts:
        raise UsageError("no prompts, expected at least one")
    for number, prompt in enumerate(prompts, 1):
        where = f"prompt {number} ({abbreviate(repr(prompt.text), 60)})"
        if not prompt.tokens:
            raise UsageError(f"{where}: has no tokens, expected at least one")
        for token in prompt.tokens:
            if token < 0 or (vocabulary is not None and token >= vocabulary):
                most = "" if vocabulary is None else f" to {vocabulary - 1}"
                raise UsageError(f"{where}: token {token}, expected numbers from 0{most}")


def is_causal(model: TokenModel, prompt: Prompt) -> bool:
    """Whether logits at a token do not depend on the token behind it; True of a prompt of one token."""
    if len(prompt.tokens) < 2:
        return True
    first, second = prompt.tokens[:2]
    other = first if first != second else int(second == 0)
    one, two = (model.rows((first, behind))[0].astype(np.float64) for behind in (second, other))
    finite = np.isfinite(one) & np.isfinite(two)
    distance = np.linalg.norm((one - two)[finite])
    return bool(distance <= _CAUSAL * np.linalg.norm(one[finite]))


def greedy_run(model: TokenModel, prompt: Prompt, count: int, *, vocabulary: int | None) -> TokenRun:
    """Generate: at each position the first of the largest logits, fed back.

    Args:
        model: The model.
        prompt: What it begins with.
        count: How many tokens at most; a token that ends a text is the last.
        vocabulary: Logits from here on are padding and never chosen; None if there are none.

    Returns:
        Its own tokens. A logit that is NaN is chosen, as nothing else would be right either.
    """
    tokens: list[int] = []
    rows = [model.begin(prompt.tokens)]
    while True:
        tokens.append(int(np.argmax(rows[-1][:vocabulary])))
        if len(tokens) == count or tokens[-1] in model.end_tokens:
            return TokenRun(prompt, tuple(tokens), np.stack(rows))
        rows.append(model.step(tokens[-1]))


def forced_run(model: TokenModel, prompt: Prompt, tokens: Sequence[int]) -> TokenRun:
    """Feed given tokens one by one, whatever the model would have chosen: teacher forcing.

    Args:
        model: The model.
        prompt: What it begins with.
        tokens: The tokens of another model's run of the same prompt, at least one; the last is not fed.
    """
    rows = [model.begin(prompt.tokens), *(model.step(token) for token in tokens[:-1])]
    return TokenRun(prompt, tuple(tokens), np.stack(rows))


def prompt_run(model: TokenModel, prompt: Prompt, *, vocabulary: int | None) -> TokenRun:
    """The logits at the prompt's own positions, of a model that reads it as a whole and generates nothing."""
    rows = model.rows(prompt.tokens)
    return TokenRun(prompt, tuple(int(token) for token in rows[:, :vocabulary].argmax(axis=1)), rows)


@dataclass(frozen=True, slots=True)
class SideRuns:
    """What one side made of all prompts.

    Attributes:
        runs: One of each prompt.
        vocabulary: How many tokens its configuration names; None if it names none.
        generates: Whether tokens follow the prompts; else logits are those at the prompts' own positions.
        device: What it ran on, in words.
    """

    runs: tuple[TokenRun, ...]
    vocabulary: int | None
    generates: bool
    device: str

    def write(self, path: Path) -> None:
        """Write an `.npz` file, whole or not at all."""
        arrays: dict[str, Any] = {
            "vocabulary": np.array(self.vocabulary or 0),
            "generates": np.array(self.generates),
            "device": np.array(self.device),
            "texts": np.array([run.prompt.text for run in self.runs]),
        }
        for number, run in enumerate(self.runs):
            arrays[f"{number}/prompt"] = np.array(run.prompt.tokens, np.int64)
            arrays[f"{number}/tokens"] = np.array(run.tokens, np.int64)
            arrays[f"{number}/logits"] = run.logits
        with build_beside(path) as building:
            with building.open("xb") as file:
                np.savez(file, **arrays)
            put_in_place(building, path)

    @classmethod
    def read(cls, path: Path) -> SideRuns:
        """Read what `write` wrote.

        Raises:
            ReadError: There is no such file, or it is none of runs.
        """
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                runs = tuple(
                    TokenRun(
                        Prompt(str(text), tuple(file[f"{number}/prompt"].tolist())),
                        tuple(file[f"{number}/tokens"].tolist()),
                        file[f"{number}/logits"],
                    )
                    for number, text in enumerate(file["texts"])
                )
                vocabulary, device = int(file["vocabulary"]) or None, str(file["device"])
                return cls(runs, vocabulary, bool(file["generates"]), device)
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise ReadError(f"{path}: holds no runs of prompts: {error}") from error
