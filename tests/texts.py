"""Toy text-to-image models, and LlamaGen's formulas without a cache, on prompts that are padded on the left."""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from golden_files import relative_error
from safetensors.torch import load_file
from torch import Tensor
from toys import runner_of, toy_models

from cspd import noise
from cspd.checkpoints import checkpoint_files
from cspd.discrete.batch import by_slot
from cspd.discrete.distributions import guide
from cspd.discrete.drafts import _eagle_root
from cspd.discrete.gpt import GPT, GPTConfig
from cspd.discrete.registry import GPTS, GPTSpec, VQDefaults, create_gpt
from cspd.discrete.runner import VQRunner
from cspd.discrete.text import TextEncoder
from cspd.method import find
from cspd.noise import Purpose
from cspd.request import Request, RoundStats, Sequence, Stopwatch

CHANNELS = 6  # of a prompt's features
MOST = 7  # tokens of a prompt
PROMPTS = ["a red fox", "blue", "an old ship in a quiet green harbour at night"]  # of 4, 2 and MOST tokens


class Words:
    """Encodes the words of a text and its end with random features, in place of T5."""

    width = CHANNELS
    bytes_to_load = 0

    def features(self, text: str, most: int, device: torch.device) -> Tensor:
        words = [*text.split()[: most - 1], "."]
        seeds = [zlib.crc32(word.encode()) for word in words]
        return torch.stack([torch.randn(CHANNELS, generator=torch.Generator().manual_seed(seed)) for seed in seeds])

    null, check = TextEncoder.null, TextEncoder.check


def folder_of_words(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """The directory of a T5 encoder, patched to compute the features of `Words`: T5 takes seconds to import."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": CHANNELS}))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()

    def computed(encoder: TextEncoder, text: str, most: int, device: torch.device) -> dict:
        features = Words().features(text, most, device)
        return {"features": features.numpy(), "count": np.array(len(text.split()) + 1)}

    patch.setattr(TextEncoder, "_made", computed)
    return folder


def small_text_checkpoint(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """A directory with the authors' layout, of a GPT with one layer for images of 8 by 8 pixels."""
    sizes = {"dim": 16, "n_layer": 1, "n_head": 2, "multiple_of": 8, "vocab_size": 512, "block_size": 16}
    config = GPTConfig(**sizes, num_classes=0, prefix_length=12, caption_dim=CHANNELS)
    defaults = VQDefaults(cfg=3.0, top_k=100, image_size=8)
    patch.setitem(GPTS, "small_t2i", GPTSpec(config, "vq_digits32", defaults))
    torch.manual_seed(0)
    args = argparse.Namespace(image_size=8, downsample_size=2)
    torch.save({"model": create_gpt("small_t2i").state_dict(), "args": args}, folder / "t2i_small.pt")
    tokenizer = load_file(checkpoint_files("digits32_vq")["tokenizer"])
    torch.save({"model": tokenizer}, folder / "vq_ds16_t2i.pt")
    folder_of_words(folder / "t5-ckpt" / "flan-t5-xl", patch)
    return folder


def text_models(codes: int = 11, length: int = 9, **more: int) -> dict:
    """As `toy_models`, for text-to-image."""
    sizes = {"num_classes": 0, "prefix_length": MOST, "caption_dim": CHANNELS, "n_layer": 2, "dim": 16} | more
    models = toy_models(codes, length, **sizes) | {"text_encoder": Words()}
    for seed, name in enumerate(("target", "draft")):
        null = models[name].cls_embedding.uncond_embedding
        null.copy_(torch.randn(null.shape, generator=torch.Generator().manual_seed(seed)))
    return models


def running(models: dict, requests: list[Request], rounds: tuple[int, ...]) -> tuple[VQRunner, list[Sequence]]:
    """A model runner, and a sequence of each request after its number of `rounds`; the first is in the last slot."""
    method = find(requests[0].method, "VQ")
    runner = runner_of(models, len(requests))
    started = []
    for i, request in enumerate(requests):
        slot = len(requests) - 1 - i
        started.append(Sequence(request, slot=slot, key=i, uses=method.uses(request), stats=RoundStats()))
    with torch.inference_mode():
        runner.admit(started)
        for sequence, times in zip(started, rounds):
            for _ in range(times):
                method.run_round(runner, [sequence], Stopwatch(runner.device))
    return runner, started


def next_logits(runner: VQRunner, started: list[Sequence]) -> Tensor:
    """Guided logits [slots, V] of the next token of every sequence."""
    batch = runner.batch_of(by_slot(started))
    features = runner.features(batch, runner.last(batch, 1)[0])
    return guide(runner.target.output(features), batch.scale)[:, 0]


def uniforms(seed: int, length: int) -> Tensor:
    """The uniform draws that a request samples its tokens with, float64 [L]."""
    none = torch.zeros(1, dtype=torch.int64)
    return noise.fine_uniform(torch.tensor(seed), Purpose.CODE, torch.arange(length), none, none)


def conditions(model: GPT, request: Request) -> list[tuple[Tensor, Tensor]]:
    """Features [MOST, CHANNELS] and which of them are not padding, bool [MOST]: of the prompt, and unconditional."""
    own = _padded(Words().features(request.prompt, MOST, torch.device("cpu")))
    if request.negative_prompt is not None:
        return [own, _padded(Words().features(request.negative_prompt, MOST, torch.device("cpu")))]
    return [own, (model.cls_embedding.uncond_embedding, own[1])]  # the null caption, under the prompt's mask


def _padded(features: Tensor) -> tuple[Tensor, Tensor]:
    missing = MOST - len(features)
    return torch.cat([torch.zeros(missing, CHANNELS), features]), torch.arange(MOST) >= missing


def plain_logits(model: GPT, features: Tensor, present: Tensor, codes: Tensor) -> Tensor:
    """Logits [1 + N, V] after a prompt and each prefix of codes [N]: the whole sequence at once, head by head."""
    w, c = model.state_dict(), model.config
    hidden = features @ w["cls_embedding.cap_proj.fc1.weight"].T
    hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    text = hidden @ w["cls_embedding.cap_proj.fc2.weight"].T
    x = torch.cat([text, w["tok_embeddings.weight"][codes]])
    visible = torch.ones(len(x), len(x)).tril().bool()
    visible[:, : len(text)] &= present
    visible |= torch.eye(len(x)).bool()  # padding attends to itself, so that nothing is divided by 0

    for i in range(c.n_layer):
        layer = f"layers.{i}."
        normed = _normed(x, w[layer + "attention_norm.weight"], c.norm_eps)
        query, key, value = (normed @ w[layer + "attention.wqkv.weight"].T).chunk(3, dim=1)
        heads = []
        for head in range(c.n_head):
            own = slice(head * c.head_dim, (head + 1) * c.head_dim)
            q, k = _turned(query[:, own], len(text), c), _turned(key[:, own], len(text), c)
            scores = (q @ k.T / math.sqrt(c.head_dim)).masked_fill(~visible, -math.inf)
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            heads.append(weights @ value[:, own])
        x = x + torch.cat(heads, 1) @ w[layer + "attention.wo.weight"].T
        normed = _normed(x, w[layer + "ffn_norm.weight"], c.norm_eps)
        gate = normed @ w[layer + "feed_forward.w1.weight"].T
        up = gate / (1 + (-gate).exp()) * (normed @ w[layer + "feed_forward.w3.weight"].T)
        x = x + up @ w[layer + "feed_forward.w2.weight"].T
    return (_normed(x, w["norm.weight"], c.norm_eps) @ w["output.weight"].T)[len(text) - 1 :]


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * weight


def _turned(x: Tensor, texts: int, c) -> Tensor:
    """Queries or keys [N, head_dim] turned by row and column; those of a prompt become 0."""
    rate = c.rope_base ** -torch.arange(0, 1, 4 / c.head_dim)
    index = torch.arange(len(x) - texts).unsqueeze(1)
    angle = torch.cat([index // c.grid * rate, index % c.grid * rate], 1)
    a, b = x[texts:, 0::2], x[texts:, 1::2]
    turned = torch.zeros_like(x)
    turned[texts:, 0::2] = a * angle.cos() - b * angle.sin()
    turned[texts:, 1::2] = b * angle.cos() + a * angle.sin()
    return turned


def plain_guided(model: GPT, request: Request, codes: Tensor) -> Tensor:
    """Guided logits [1 + N, V] after each prefix of codes [N]."""
    own, null = (plain_logits(model, *condition, codes) for condition in conditions(model, request))
    return null + request.cfg * (own - null)


def plain_codes(model: GPT, request: Request, uniforms: Tensor | None = None) -> Tensor:
    """Tokens int64 [L] of a request, as `one_by_one`."""

    def logits(codes: Tensor) -> Tensor:
        own = plain_guided(model, request, codes)[-1]
        if request.top_k and uniforms is not None:
            own = own.masked_fill(own < own.sort().values[-request.top_k], -math.inf)
        return own

    return one_by_one(logits, model.config.block_size, uniforms)


def one_by_one(logits: Callable[[Tensor], Tensor], length: int, uniforms: Tensor | None) -> Tensor:
    """Tokens int64 [L]: the likeliest ones, or those at `uniforms` [L] of the inverse distribution function.

    `logits` maps the tokens before [N] to the logits [V] of the next one.
    """
    codes = torch.empty(0, dtype=torch.int64)
    for i in range(length):
        if uniforms is None:
            code = logits(codes).argmax()
        else:
            code = (logits(codes).double().softmax(0).cumsum(0) > uniforms[i]).int().argmax()
        codes = torch.cat([codes, code.view(1)])
    return codes


def check_training_and_drafting(models: dict, asked: list[Request], rounds: tuple[int, ...]) -> None:
    """Training must give an EAGLE drafter the inputs, and get from it the outputs, that drafting has.

    Args:
        asked: requests of the method eagle, one for each of PROMPTS. rounds: of each sequence before it is compared.
    """
    from conditions import inputs_of  # they import torchvision and matplotlib, which takes seconds
    from train_eagle import predict

    runner, started = running(models, asked, rounds)
    slots = torch.tensor([sequence.slot for sequence in started])
    length = runner.seq_len - 1
    with torch.inference_mode():
        batch = runner.batch_of(by_slot(started))
        root = _eagle_root(runner, batch, 3)[:, slots, 0]
        last = runner.features(batch, runner.last(batch, 1)[0])[:, slots, 0]
        past = runner.past.before(batch, torch.arange(1, length + 1).expand(3, -1))[:, slots]

        # both guidance branches of the three sequences
        codes = runner.tokens[slots, :length].repeat(2, 1)
        is_null = torch.arange(6) >= 3
        inputs = inputs_of(runner, PROMPTS, torch.arange(3).repeat(2), is_null, codes)
        predicted, features = predict(models["target"], models["eagle"], inputs, 0.0, torch.Generator())
    predicted = predicted.unflatten(0, (2, 3))
    features = features.unflatten(0, (2, 3))
    for i, sequence in enumerate(started):
        count = sequence.num_committed
        assert relative_error(features[:, i, count], last[:, i]) < 1e-5
        assert relative_error(predicted[:, i, count], root[:, i]) < 1e-5
        if count:
            assert relative_error(features[:, i, :count], past[:, i, :count]) < 1e-5
    assert len({sequence.num_committed for sequence in started}) > 1
