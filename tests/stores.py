"""Small checkpoints, for tests of folders and files: there it does not matter what the images show."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

import torch

from cspd.checkpoints import checkpoint_files
from cspd.discrete.family import VQModels
from cspd.discrete.registry import load_gpt, load_tokenizer
from cspd.models import save_models

CACHE = Path(os.environ["XDG_CACHE_HOME"])


@functools.cache
def small_checkpoint() -> str:
    """A folder with a MAR of two layers and its autoencoder."""
    files = checkpoint_files("digits32")
    return _folder("small_mar", {"target": files["draft"], "vae": files["vae"]})


@functools.cache
def small_vq_checkpoint() -> str:
    """A folder with a GPT of three layers and its tokenizer, at a quarter of the tokens: images of 16 by 16 pixels."""
    files = checkpoint_files("digits32_vq")
    folder = CACHE / "small_vq"
    target = load_gpt(files["draft"], sizes={"block_size": 64})
    save_models(VQModels(target, tokenizer=load_tokenizer(files["tokenizer"])), folder)
    return str(folder)


def _folder(name: str, files: dict[str, Path]) -> str:
    folder = CACHE / name
    folder.mkdir()
    for part, file in files.items():
        shutil.copy(file, folder / f"{part}.safetensors")
    return str(folder)


def other_weights(file: Path, copy: Path) -> Path:
    """A copy of a file of weights, of the same size, with another last number."""
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    copy.write_bytes(content)
    return copy


@functools.cache
def small_text_encoder() -> str:
    """A folder with a T5 encoder of two layers and a tokenizer that knows the letters, as FLAN-T5's on the hub."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    folder = CACHE / "small_t5"
    names = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    letters = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s*."), "isolated")
    letters.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"d_model": 6, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "vocab_size": len(names)}
    model = T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return str(folder)


@functools.cache
def small_clip() -> str:
    """A folder with a CLIP model of two layers, a tokenizer that knows the letters and a processor of images."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = CACHE / "small_clip"
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    pixels = {"shortest_edge": 16}
    images = CLIPImageProcessor(size=pixels, crop_size={"height": 16, "width": 16})
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": len(names), "max_position_embeddings": 12, "eos_token_id": len(names) - 1}
    config = CLIPConfig(
        text_config=text | {"bos_token_id": len(names) - 2, "pad_token_id": len(names) - 1},
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        projection_dim=6,
    )
    model = CLIPModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return str(folder)
