"""The features that LlamaGen's models take of a text, of a T5 encoder by transformers from a local folder.

Of the official models it is FLAN-T5-XL's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cspd.items import read_item, write_item
from cspd.keeping import identity_of, user_cache
from cspd.parsing import shortened
from cspd.pretrained import WEIGHTS, check_files
from cspd.records import read_json
from cspd.telling import telling
from cspd.vq.captions import cleaned
from mar.tensors import CheckpointError

SOURCE = "google/flan-t5-xl on the Hugging Face hub has them, see docs/text.md"
PLACE = (
    f"{SOURCE}: put its files into flan-t5-xl/ beside the checkpoint, those of an encoder of its own into"
    " text_encoder/, or name the folder (--text-encoder)"
)
FILES = {  # what a folder must have, any of each
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json",),
    "weights": WEIGHTS,
}
SIZES = {  # what a T5 has where its configuration does not say
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 32128,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 32,
}
LIBRARIES = ("transformers", "ftfy", "bs4")
REMEMBERED = 256  # texts in memory, of up to a megabyte


def missing_library() -> str | None:
    """One of those that encoding a text takes and that is not installed."""
    return next((library for library in LIBRARIES if importlib.util.find_spec(library) is None), None)


class Truncated(UserWarning):
    """A text has more tokens than the model takes."""


class TextEncoder:
    """A T5 encoder and its tokenizer, which are read where a text is new: features are kept in the user's cache folder.

    Args:
        folder: their files, as the hub has them.

    Raises:
        CheckpointError: the folder lacks a file, or has another model's. ValueError: a library is missing.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        check_files(self.folder, FILES, "the text encoder", SOURCE)
        config = self._config()
        if config.get("model_type") != "t5" or not isinstance(config.get("d_model"), int):
            raise CheckpointError(f"{self.folder / 'config.json'} is of another model than T5's encoder: {SOURCE}")
        if missing := missing_library():
            raise ValueError(f"texts need {missing}, which is not installed: pip install 'cspd[text]'")
        self.width: int = config["d_model"]
        self._sizes = SIZES | config
        for name, published in SIZES.items():
            if type(self._sizes[name]) is not type(published):
                raise CheckpointError(
                    f"{self.folder / 'config.json'}: {name}={shortened(self._sizes[name])} is no"
                    f" {type(published).__name__}: fetch it again"
                )
        self._remembered = functools.lru_cache(maxsize=REMEMBERED)(self._kept)

    def features(self, text: str, most: int, device: torch.device) -> Tensor:
        """Features float32 [n, width], on the CPU, of a text's tokens and its end's, at most so many.

        As LlamaGen's authors do, the text is cleaned first, and cut where it is too long, which is warned of.

        Args:
            device: where they are computed, if they have not been before.

        Raises:
            CheckpointError: the files cannot be read.
        """
        features, count = self._remembered(text, most, device)
        if count > most:
            warnings.warn(
                f"{shortened(text)} has {count} tokens: the model takes {most}, and the rest is cut off",
                Truncated,
                stacklevel=1,
            )
        return features

    def null(self, features: Tensor, most: int) -> None:
        """No text's features guide where a request has no negative prompt: the model has a null caption of its own."""

    def check(self, request: object, most: int) -> None:
        """Nothing is wrong with a text: a longer one is cut."""

    @functools.cached_property
    def identity(self) -> str:
        """A hash of the files' names, sizes and times."""
        return identity_of(self.folder)

    @property
    def bytes_to_load(self) -> int:
        """Of its weights in float32, by the sizes in its configuration; 0 once they are loaded."""
        if "models" in vars(self):
            return 0
        sizes, width = self._sizes, self.width
        heads, hidden = sizes["num_heads"], sizes["d_ff"]
        matrices = 3 if str(sizes["feed_forward_proj"]).startswith("gated") else 2
        layer = 4 * width * heads * sizes["d_kv"] + matrices * width * hidden + 2 * width  # attention, MLP, norms
        others = sizes["vocab_size"] * width + sizes["relative_attention_num_buckets"] * heads + width
        return torch.float32.itemsize * (sizes["num_layers"] * layer + others)

    def _config(self) -> dict:
        path = self.folder / "config.json"
        try:
            config = read_json(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}): {SOURCE}") from error
        return config if isinstance(config, dict) else {}

    def _kept(self, text: str, most: int, device: torch.device) -> tuple[Tensor, int]:
        """Features, and how many tokens the whole text has, from the cache folder or computed and kept there."""
        text = cleaned(text)
        made_of = {"encoder": self.identity, "text": text, "most": most}
        name = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
        folder = user_cache() / "text"
        kept = read_item(folder / f"{name}.npz", made_of, {"count": (np.integer, ())})
        if kept is None:
            kept = self._made(text, most, device)
            with contextlib.suppress(OSError):  # read-only: computed again next time
                folder.mkdir(parents=True, exist_ok=True)
                write_item(folder / f"{name}.npz", kept, made_of)
        return torch.from_numpy(kept["features"]), int(kept["count"])

    def _made(self, text: str, most: int, device: torch.device) -> dict[str, Any]:
        tokenizer, encoder = self.models
        tokenizer.no_truncation()
        count = len(tokenizer.encode(text).ids)
        tokenizer.enable_truncation(most)  # before the end's token
        tokens = torch.tensor([tokenizer.encode(text).ids])
        with torch.inference_mode():
            features = encoder.to(device)(input_ids=tokens.to(device)).last_hidden_state[0]
        return {"features": features.float().cpu().numpy(), "count": np.array(count)}

    @functools.cached_property
    def models(self) -> tuple[Any, Any]:
        """The tokenizer, and the encoder in float32."""
        with telling(f"loading {self.folder}"):
            from tokenizers import Tokenizer
            from transformers import T5EncoderModel

            try:
                tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
                encoder, report = T5EncoderModel.from_pretrained(
                    self.folder, local_files_only=True, output_loading_info=True
                )
            except Exception as error:  # a damaged file can fail anywhere in the readers
                raise CheckpointError(f"{self.folder}: cannot be read as T5's encoder ({error}): {SOURCE}") from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])[0]
            raise CheckpointError(f"{self.folder}: not the weights of T5's encoder: {missing} is missing: {SOURCE}")
        tokenizer.no_padding()
        return tokenizer, encoder.float().eval()
