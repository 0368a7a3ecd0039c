"""From prompts to features: cleaning of captions, and the T5 encoder."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import html
import importlib.util
import json
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import numpy as np
import torch
from torch import Tensor

from cspd.files import WEIGHTS, check_files, check_loaded, read_item, read_json, user_cache, write_item
from cspd.origin import identity_of
from cspd.terminal import install, shortened, telling
from mar.checkpoint import MOST
from mar.tensors import CheckpointError, reason_of

# Captions are cleaned by the rules of DeepFloyd IF, which LlamaGen's authors apply in training and in sampling.
#
# The models were trained on the output of these rules, so even odd ones are reproduced. Every rule takes time
# proportional to the caption's length, for any caption.

HOST = r"[a-zA-Z0-9.\-]"
DOMAIN = rf"{HOST}+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
SUFFIX = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
DASHES = "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
EASTERN_DASHES = "\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
DECORATION = re.escape("#®•©™&@·º½¾¿¡§~)(][}{|\\/*")
MOST_HYPHENS = 3  # with more, hyphens and underscores become spaces

Rules = Sequence[tuple[str, str]]  # pattern, replacement
ADDRESSES: Rules = [  # a word that is not an address is matched and put back whole, so that it is tried only once
    (rf"\b(?:{scheme}:(?:/{{1,3}}|[a-zA-Z0-9%])|{DOMAIN}|((?:(?!\b{scheme}:){HOST})+))", r"\1")
    for scheme in ("https?", "www")
]
CHARACTERS: Rules = [
    (r"@\w+\b", ""),  # account names
    (r"[\u31c0-\u9fff]+", ""),  # Chinese and Japanese
    (f"[{DASHES}{EASTERN_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),  # article numbers
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"(?<!\S)\S+\.{SUFFIX}", ""),  # file names
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (f"[{DECORATION}]+", " "),
    (r"(?<!\s)\s+\.\s+", " "),
]
WORDS: Rules = [
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # product numbers
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),  # phrases of shops and web pages
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{SUFFIX}(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d[a-zA-Z\d]*\b", " "),
    (r"\b\d+(?:\.\d*)?[xх×]\d+(?:\.\d*)?\b", ""),  # sizes
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),  # quotes and punctuation at both ends
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
]


def cleaned(caption: str) -> str:
    """Applies the rules to a caption twice, as the authors do."""
    return _cleaned_once(_cleaned_once(caption))


def _cleaned_once(caption: str) -> str:
    import ftfy

    caption = unquote_plus(caption).strip().lower().replace("<person>", "person")
    # the order of the steps is the authors'
    caption = _without_tags(_by(ADDRESSES, caption))
    caption = _by(CHARACTERS, caption)
    if len(re.findall("[-_]", caption)) > MOST_HYPHENS:
        caption = re.sub("[-_]", " ", caption)
    caption = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return _by(WORDS, caption).strip()


def _by(rules: Rules, caption: str) -> str:
    for pattern, replacement in rules:
        caption = re.sub(pattern, replacement, caption)
    return caption


def _without_tags(caption: str) -> str:
    """The text of a piece of HTML."""
    if not re.search("[<&]", caption):
        return caption
    from bs4 import BeautifulSoup
    from bs4.builder import ParserRejectedMarkup

    try:
        return BeautifulSoup(caption, features="html.parser").text
    except ParserRejectedMarkup:  # some Python versions cannot parse "<!["
        return caption


# LlamaGen's text-to-image models read features of a T5 encoder: FLAN-T5-XL for the official models.

SOURCE = "google/flan-t5-xl on the Hugging Face Hub has them, see docs/text.md"
PLACE = (
    f"{SOURCE}: put its files into flan-t5-xl/ next to the checkpoint, those of the model's own encoder into"
    " text_encoder/, or pass the directory (--text-encoder)"
)
FILES = {  # required: one of the names of each
    "configuration": ("config.json",),
    "tokenizer": ("tokenizer.json",),
    "weights": WEIGHTS,
}
SIZES = {  # the defaults of T5's configuration
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 32128,
    "feed_forward_proj": "relu",
    "relative_attention_num_buckets": 32,
}
LIBRARIES = ("transformers", "ftfy", "bs4")
REMEMBERED = 256  # texts in memory; the features of each take up to a megabyte


def missing_library() -> str | None:
    """A library that the text encoder needs and that is not installed, or None."""
    return next((library for library in LIBRARIES if importlib.util.find_spec(library) is None), None)


class Truncated(UserWarning):
    """A text has more tokens than the model takes."""


class TextEncoder:
    """A T5 encoder and its tokenizer, loaded for the first new text. Features are cached in the user's cache directory.

    Args:
        folder: a directory with the files that the Hub has.

    Raises:
        CheckpointError: a file is missing, or belongs to another model.
        ValueError: a library is not installed.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        self.folder = Path(folder)
        check_files(self.folder, FILES, "the text encoder", SOURCE)
        config = self._config()
        if config.get("model_type") != "t5" or not isinstance(config.get("d_model"), int):
            raise CheckpointError(f"{self.folder / 'config.json'} is not the configuration of a T5 encoder: {SOURCE}")
        missing = missing_library()
        if missing is not None:
            raise ValueError(f"prompts need {missing}, which is not installed: {install('text')}")
        self.width: int = config["d_model"]
        self._sizes = SIZES | config
        for name, usual in SIZES.items():
            value = self._sizes[name]
            if type(value) is not type(usual) or (isinstance(value, int) and not 0 < value <= MOST):
                raise CheckpointError(f"{self.folder / 'config.json'}: {name}={value!r} is not a size of T5: {SOURCE}")
        self._remembered = functools.lru_cache(maxsize=REMEMBERED)(self._cached)

    def features(self, text: str, most: int, device: torch.device) -> Tensor:
        """Features float32 [n, width], n <= most, on the CPU, of a text's tokens and the end token.

        As LlamaGen's authors do, the text is cleaned first, and truncated if it is too long, with a warning.

        Args:
            device: computes features that are not cached.

        Raises:
            CheckpointError: the files cannot be read.
        """
        features, count = self._remembered(text, most, device)
        if count > most:
            warnings.warn(
                f"{shortened(text)} has {count} tokens, but the model takes {most}: the text is truncated",
                Truncated,
                stacklevel=1,
            )
        return features

    def null(self, features: Tensor, most: int) -> Tensor | None:
        """None: without a negative prompt, the unconditional branch is the model's own `uncond_embedding`."""

    def check(self, request: object, most: int) -> None:
        """Accepts all texts, since long ones are truncated."""

    @functools.cached_property
    def identity(self) -> str:
        """A hash of the files' names and contents."""
        return identity_of(self.folder)

    @property
    def bytes_to_load(self) -> int:
        """Bytes of the weights in float32, computed from the configuration; 0 once they are loaded."""
        if "models" in vars(self):  # the cached property has been computed
            return 0
        sizes = self._sizes
        width = self.width
        heads = sizes["num_heads"]
        attention = 4 * width * heads * sizes["d_kv"]
        # a gated feed-forward layer has one matrix more (T5 1.1 and FLAN-T5)
        matrices = 3 if sizes["feed_forward_proj"].startswith("gated") else 2
        feed_forward = matrices * width * sizes["d_ff"]
        norms = 2 * width
        layers = sizes["num_layers"] * (attention + feed_forward + norms)
        embeddings = sizes["vocab_size"] * width
        positions = sizes["relative_attention_num_buckets"] * heads
        final_norm = width
        return torch.float32.itemsize * (layers + embeddings + positions + final_norm)

    def _config(self) -> dict:
        path = self.folder / "config.json"
        try:
            config = read_json(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read ({reason_of(error)}): {SOURCE}") from error
        return config if isinstance(config, dict) else {}

    def _cached(self, text: str, most: int, device: torch.device) -> tuple[Tensor, int]:
        """Features, and the number of tokens of the whole text, from the cache directory or computed."""
        # features depend on the limit too, since tokens attend to each other
        text = cleaned(text)
        key = {"encoder": self.identity, "text": text, "most": most}
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        file = user_cache() / "text" / f"{name}.npz"
        item = read_item(file, key, {"count": (np.integer, ())})
        if item is None:
            item = self._made(text, most, device)
            with contextlib.suppress(OSError):  # a directory that cannot be written: computed again next time
                file.parent.mkdir(parents=True, exist_ok=True)
                write_item(file, item, key)
        return torch.from_numpy(item["features"]), int(item["count"])

    def _made(self, text: str, most: int, device: torch.device) -> dict[str, Any]:
        tokenizer, encoder = self.models
        # the whole text is counted for the warning, then truncated
        tokenizer.no_truncation()
        count = len(tokenizer.encode(text).ids)
        tokenizer.enable_truncation(most)  # the end token stays
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
                loaded: Any = T5EncoderModel.from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=False, output_loading_info=True
                )
                encoder, report = loaded
            except Exception as error:  # a damaged file can fail anywhere in the readers
                raise CheckpointError(
                    f"{self.folder}: cannot be read as a T5 encoder ({reason_of(error)}): {SOURCE}"
                ) from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])[0]
            raise CheckpointError(f"{self.folder}: not the weights of a T5 encoder ({missing} is missing): {SOURCE}")
        check_loaded(encoder, report, self.folder, SOURCE)
        # texts are encoded one at a time, without the authors' padding, which is masked anyway
        tokenizer.no_padding()
        return tokenizer, encoder.float().eval()
