"""From texts to features: the T5 encoder, and how captions are cleaned."""

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

from cspd.files import WEIGHTS, check_files, identity_of, read_item, read_json, user_cache, write_item
from cspd.terminal import shortened, telling
from mar.tensors import CheckpointError

# Captions in the form that LlamaGen's models know: plain words in lower case, as of web pages' captions.
#
# The rules are those of DeepFloyd IF, which LlamaGen's authors apply to every caption, in training and in sampling.
# They are what they are: a model was trained on what they leave, down to their oddities. Every rule takes time in
# proportion to the caption's length, however odd the caption is.

HOST = r"[a-zA-Z0-9.\-]"
DOMAIN = rf"{HOST}+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
SUFFIX = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
DASHES = "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
EASTERN_DASHES = "\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
DECORATION = re.escape("#®•©™&@·º½¾¿¡§~)(][}{|\\/*")
MOST_HYPHENS = 3  # with more, hyphens and underscores are taken for spaces

Rules = Sequence[tuple[str, str]]
ADDRESSES: Rules = [  # a word without a domain is put back whole: nothing after its first letter is tried again
    (rf"\b(?:{scheme}:(?:/{{1,3}}|[a-zA-Z0-9%])|{DOMAIN}|((?:(?!\b{scheme}:){HOST})+))", r"\1")
    for scheme in ("https?", "www")
]
CHARACTERS: Rules = [
    (r"@\w+\b", ""),  # names of accounts
    (r"[\u31c0-\u9fff]+", ""),  # Chinese and Japanese
    (f"[{DASHES}{EASTERN_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # addresses of computers
    (r"\d:\d\d\s+$", ""),  # numbers: of articles, of lists, and long ones
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"(?<!\S)\S+\.{SUFFIX}", ""),  # names of files
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (f"[{DECORATION}]+", " "),
    (r"(?<!\s)\s+\.\s+", " "),
]
WORDS: Rules = [
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # numbers of products
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),  # what shops and pages say around a caption
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{SUFFIX}(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d[a-zA-Z\d]*\b", " "),
    (r"\b\d+(?:\.\d*)?[xх×]\d+(?:\.\d*)?\b", ""),  # sizes
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),  # what stands at the ends
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
]


def cleaned(caption: str) -> str:
    """A caption by the rules, twice, as the authors apply them."""
    return _cleaned_once(_cleaned_once(caption))


def _cleaned_once(caption: str) -> str:
    import ftfy

    caption = unquote_plus(caption).strip().lower().replace("<person>", "person")
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


# The features that LlamaGen's models take of a text, of a T5 encoder by transformers from a local folder.
#
# Of the official models it is FLAN-T5-XL's.

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
