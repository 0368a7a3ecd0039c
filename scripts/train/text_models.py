"""A text-to-image GPT together with its T5 encoder, for training: a new small encoder, or an existing one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from cspd.discrete.gpt import GPT
from cspd.discrete.text import TextEncoder, cleaned

if TYPE_CHECKING:
    from transformers import T5EncoderModel

LAYERS, HEADS = 2, 4
PAD, END, UNKNOWN = SPECIAL = ("<pad>", "</s>", "<unk>")  # ids 0, 1 and 2, as in T5


class Texts(NamedTuple):
    """The tokens of texts.

    Attributes:
        ids: int64 [B, n], padded on the left as in LlamaGen. present: bool [B, n], False at padding.
        is_null: bool [B], True if the unconditional branch replaces the text.
    """

    ids: Tensor
    present: Tensor
    is_null: Tensor


class TextGPT(nn.Module):
    """A GPT and the encoder of its prompts.

    Attributes:
        gpt: its `uncond_embedding` is not trained: small random numbers, as in LlamaGen.
        encoder: a `transformers.T5EncoderModel`.
    """

    def __init__(self, gpt: GPT, encoder: T5EncoderModel) -> None:
        super().__init__()
        self.gpt, self.encoder = gpt, encoder

    def forward(self, texts: Texts, tokens: Tensor) -> Tensor:
        """Logits [B, 1 + N, V], as `GPT.forward`.

        As in sampling, the unconditional branch has the length of the text that it replaces.
        """
        features = self.encoder(input_ids=texts.ids, attention_mask=texts.present).last_hidden_state
        null = self.gpt.cls_embedding.uncond_embedding[-texts.ids.shape[1] :]
        condition = torch.where(texts.is_null[:, None, None], null, features)
        return self.gpt(condition, tokens, texts.present)


def new_tokenizer(texts: Iterable[str], num: int) -> Tokenizer:
    """A byte-pair tokenizer of at most `num` tokens, trained on texts, without case and punctuation."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"\W+"), " "),
            normalizers.Strip(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=num, special_tokens=[*SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(map(cleaned, texts), trainer)
    end = (END, tokenizer.token_to_id(END))
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {END}", special_tokens=[end])
    return tokenizer


def new_encoder(tokenizer: Tokenizer, width: int) -> T5EncoderModel:
    """A small T5 encoder with random weights."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=width,
        d_kv=width // HEADS,
        d_ff=2 * width,
        num_layers=LAYERS,
        num_heads=HEADS,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        pad_token_id=tokenizer.token_to_id(PAD),
        eos_token_id=tokenizer.token_to_id(END),
    )
    return T5EncoderModel(config)


def read_encoder(folder: Path) -> tuple[Tokenizer, T5EncoderModel]:
    """The tokenizer and the encoder in a directory. Raises CheckpointError as `TextEncoder` does."""
    return TextEncoder(folder).models


def save_encoder(tokenizer: Tokenizer, encoder: T5EncoderModel, folder: Path) -> None:
    """Writes a directory that `TextEncoder` reads, in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    encoder.half().save_pretrained(folder)


def tokens_of(tokenizer: Tokenizer, texts: Sequence[str], most: int, is_null: Tensor) -> Texts:
    """Tokens of texts, cleaned as in sampling and truncated to `most`, on the device of `is_null`."""
    tokenizer.enable_truncation(most)
    tokenizer.enable_padding(direction="left", pad_id=tokenizer.token_to_id(PAD), pad_token=PAD)
    encoded = tokenizer.encode_batch([cleaned(text) for text in texts])
    ids = torch.tensor([each.ids for each in encoded], device=is_null.device)
    present = torch.tensor([each.attention_mask for each in encoded], device=is_null.device).bool()
    return Texts(ids, present, is_null)
