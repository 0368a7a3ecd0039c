"""The tokens that a model of `transformers` takes in before the first code, by its own tokenizer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from cspd.parsing import shortened
from cspd.sequence import Request
from cspd.vq.hosted.config import Architecture, Image

REMEMBERED = 4096  # prompts in memory


class Prompts:
    """Makes tokens of texts, in the place of `cspd.vq.text.TextEncoder`.

    Args:
        tokenizer: the model's own. architecture: what it puts around a text. image: what comes after it.
    """

    width = 0
    bytes_to_load = 0  # a tokenizer has no weights

    def __init__(self, tokenizer: Any, architecture: Architecture, image: Image) -> None:
        self.tokenizer, self.architecture, self.image = tokenizer, architecture, image
        self._of_text = functools.lru_cache(maxsize=REMEMBERED)(self._tokens)

    def features(self, text: str, most: int, device: torch.device) -> Tensor:
        """The tokens of a prompt, int64 [n], n <= most, on the CPU.

        Raises:
            ValueError: it has more tokens, or the tokenizer lacks one of the model's.
        """
        tokens = self._of_text(text)
        if len(tokens) > most:
            raise ValueError(
                f"{shortened(text)} has {len(tokens)} tokens and the model takes {most}: give a shorter prompt"
            )
        return tokens

    def null(self, prompt: Tensor, most: int) -> Tensor:
        """The tokens that guidance leads away from where a request does not say, int64 [n], n <= most, on the CPU.

        Raises ValueError where the tokenizer lacks one of them, or there are more.
        """
        made = self._made(self.architecture.null(self.tokenizer, prompt.tolist(), self.image), "guidance")
        if len(made) > most:
            raise ValueError(f"guidance leads away from {len(made)} tokens and the model takes {most}: give cfg=1")
        return made

    def check(self, request: Request, most: int) -> None:
        """Raises ValueError where a request's prompts are too long, or guidance needs one that cannot be made."""
        own = self.features(request.prompt, most, torch.device("cpu"))
        if request.negative_prompt is not None:
            self.features(request.negative_prompt, most, torch.device("cpu"))
        elif request.guided:
            self.null(own, most)

    def _tokens(self, text: str) -> Tensor:
        return self._made(self.architecture.prompt(self.tokenizer, text, self.image), "a prompt")

    def _made(self, tokens: list[int | None], what: str) -> Tensor:
        if None in tokens:
            fix = "give a negative_prompt, or cfg=1" if what == "guidance" else "take the tokenizer files of the model"
            raise ValueError(
                f"{what} needs a special token that this tokenizer of {self.architecture.name} models does not"
                f" have: {fix}"
            )
        return torch.tensor(tokens)
