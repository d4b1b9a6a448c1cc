"""A model as what gives logits for token ids, whatever framework it is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tensorcap_formats.dtypes import Array


class TokenModel(Protocol):
    """A model that gives logits over a vocabulary for a row of tokens.

    Attributes:
        name: Class of the model.
        device: What it runs on, in words.
        vocabulary: How many tokens its configuration names; None if it names none. Logits behind are padding.
        end_tokens: Tokens that end a text.
        prompts: The rows of tokens that its workload was made for.
    """

    name: str
    device: str
    vocabulary: int | None
    end_tokens: frozenset[int]

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]: ...  # noqa: D102 # among the attributes above

    def rows(self, tokens: Sequence[int], start: int = 0) -> Array:
        """Logits at each position from one on.

        Args:
            tokens: Token ids, at least one.
            start: The first position.

        Returns:
            [len(tokens) - start, V] float32 or float64. A model that gives those of its last position alone
            is given each prefix.

        Raises:
            UsageError: It returns no logits, or cannot be given other tokens.
        """

    def begin(self, prompt: Sequence[int]) -> Array:
        """Start a generation.

        Args:
            prompt: Token ids, at least one.

        Returns:
            [V] logits of the token that follows.

        Raises:
            UsageError: As `rows`.
        """

    def step(self, token: int) -> Array:
        """Go on with a token, through the model's own cache if it has one.

        Returns:
            [V] logits of the token that follows it.
        """
