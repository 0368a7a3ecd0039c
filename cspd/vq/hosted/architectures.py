"""The architectures of `transformers` that are hosted, by what its own code does with them.

Sources: `transformers.models.janus`, `.chameleon` and `.emu3`; how they are sampled:
    Janus-Pro: Chen et al., arXiv 2501.17811, and `JanusForConditionalGeneration.generate`.
    Chameleon: arXiv 2405.09818, and Anole: Chern et al., arXiv 2407.06135, by Chameleon's own image decoder.
    Lumina-mGPT: Liu et al., arXiv 2408.02657, and the authors' inference_solver.py and item_processor.py.
    Emu3: Wang et al., arXiv 2409.18869, and the authors' example of image generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from cspd.vq.hosted.config import CHAMELEON_DECODER, Architecture, Image, Parts
from cspd.vq.hosted.pixels import ChameleonPixels, Emu3Pixels, JanusPixels
from cspd.vq.registry import SamplingDefaults
from mar.tensors import CheckpointError

EMU3_AREA = 518400  # pixels of an image, `Emu3Processor`'s default
EMU3_NEGATIVE = (  # what the authors guide away from
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality,"
    " low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)

LUMINA = "lumina_mgpt"
LUMINA_MARK = "mask_image_logits"  # a setting of its own, beside those of Chameleon
# of Lumina-mGPT, by their names in Chameleon's vocabulary
LUMINA_TURN_END, LUMINA_ROW_END, LUMINA_SIZE = "<reserved08706>", "<reserved08799>", "<reserved{:05d}>"
LUMINA_FIRST_SIZE = 8800  # that of no codes
LUMINA_UNIT = 2  # codes that sizes are counted in, along a side
LUMINA_NAME = re.compile(r"mGPT-\w+-(\d+)")  # pixels of a side


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def _special(tokenizer: Any, name: str) -> int | None:
    """The number of a token that a tokenizer knows by what it is for; None where it has none."""
    token = getattr(tokenizer, name, None)
    return None if token is None else tokenizer.get_vocab().get(token)


def _stride(vq_config: Any) -> int:
    return 2 ** (len(vq_config.channel_multiplier) - 1)


def _normed_by(processor: Mapping[str, Any]) -> dict[str, Any]:
    """`mean` and `std` of an `Image`, where a folder gives them."""
    return {name: processor[f"image_{name}"] for name in ("mean", "std") if processor.get(f"image_{name}")}


def _tokens_of(config: Any, mapping: Any, num_codes: int) -> list[int]:
    """The tokens of codes 0, 1, ..., of a configuration that names its vocabulary."""
    tokens = mapping.img2bpe if config.vocabulary_map else {}
    if sorted(tokens) != list(range(num_codes)):
        raise CheckpointError(
            f"config.json: vocabulary_map names {len(tokens)} image tokens and the images have {num_codes} codes: take"
            " the config.json of a model that makes images, as it is on the hub"
        )
    return [tokens[code] for code in range(num_codes)]


def _rows(linear: nn.Linear, tokens: list[int]) -> nn.Linear:
    """The part of an output layer that has the logits of some tokens."""
    part = nn.Linear(linear.in_features, len(tokens), bias=False, device="meta")
    part.weight = nn.Parameter(linear.weight.detach()[_index(tokens, linear.weight)], requires_grad=False)
    return part


def _index(tokens: list[int], like: Tensor) -> Tensor:
    return torch.tensor(tokens, device=like.device)


def _janus_image(config: Any, processor: Mapping[str, Any]) -> Image:
    vq = config.vq_config
    return Image(vq.num_patches, _stride(vq), vq.num_embeddings, **_normed_by(processor))


@torch.no_grad()
def _janus_parts(model: Any, image: Image, decoder: Path | None) -> Parts:
    own = model.model
    codes = torch.arange(image.num_codes, device=own.generation_embeddings.weight.device)
    embeddings = model.prepare_embeddings_for_image_generation(codes)
    return Parts(own.language_model, embeddings, own.generation_head, JanusPixels(own.vqmodel, image))


def _janus_prompt(tokenizer: Any, text: str, image: Image) -> list[int | None]:
    """As the processor with `generation_mode="image"`, of the conversation that has nothing but the text."""
    if tokenizer.chat_template:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return [*_ids(tokenizer, text), _special(tokenizer, "boi_token")]


def _janus_null(tokenizer: Any, prompt: list[int], image: Image) -> list[int | None]:
    """As `generate`: what is neither the first token nor the image's start is padding."""
    kept = {tokenizer.bos_token_id, _special(tokenizer, "boi_token")}
    return [token if token in kept else tokenizer.pad_token_id for token in prompt]


def _chameleon_image(config: Any, processor: Mapping[str, Any]) -> Image:
    from transformers.models.chameleon.modeling_chameleon import ChameleonImageVocabularyMapping

    vq = config.vq_config
    mapping = ChameleonImageVocabularyMapping(config.vocabulary_map)
    stride = _stride(vq)
    return Image(vq.resolution // stride, stride, vq.num_embeddings, _tokens_of(config, mapping, vq.num_embeddings))


def _chameleon_parts(model: Any, image: Image, decoder: Path | None) -> Parts:
    """`transformers` forbids its images' tokens, after the output layer; here is that layer's part of them."""
    embeddings = model.model.embed_tokens.weight.detach()
    codes = embeddings[_index(image.tokens, embeddings)]
    pixels = decoder and ChameleonPixels(model.model.vqmodel, image, decoder)
    return Parts(model.model, codes, _rows(model.lm_head, image.tokens), pixels)


def _chameleon_prompt(tokenizer: Any, text: str, image: Image) -> list[int | None]:
    """As the processor, a turn that is ended by the separator; then the image's start."""
    return [*_ids(tokenizer, text + (tokenizer.sep_token or "")), _chameleon_start(tokenizer)]


def _chameleon_start(tokenizer: Any) -> int | None:
    found = _special(tokenizer, "boi_token")
    return tokenizer.get_vocab().get("<racm3:break>") if found is None else found


def _chameleon_null(tokenizer: Any, prompt: list[int], image: Image) -> list[int | None]:
    return [tokenizer.bos_token_id, _chameleon_start(tokenizer)]


def _lumina_image(config: Any, processor: Mapping[str, Any]) -> Image:
    """Chameleon's codes, in rows that end; the configuration is the same for all sizes."""
    image, place = _chameleon_image(config, processor), Path(config.name_or_path).absolute()
    pixels = LUMINA_NAME.findall(str(place))
    if not pixels:
        raise CheckpointError(
            f"{place}: only the name tells the pixels of Lumina-mGPT's images: keep the hub's, as Lumina-mGPT-7B-768"
        )
    row_end = config.vocabulary_map.get(LUMINA_ROW_END)
    if row_end is None:
        raise CheckpointError(f"config.json: vocabulary_map lacks {LUMINA_ROW_END}, which ends a row: fetch it again")
    return replace(image, side=int(pixels[-1]) // image.stride, row_end=row_end)


def _lumina_class() -> type:
    from cspd.vq.hosted.lumina import SharedNorms

    return SharedNorms


def _lumina_parts(model: Any, image: Image, decoder: Path | None) -> Parts:
    from cspd.vq.hosted.lumina import spread_norms

    spread_norms(model)
    return _chameleon_parts(model, image, decoder)


def _lumina_prompt(tokenizer: Any, text: str, image: Image) -> list[int | None]:
    """A turn that asks for an image, and how the answer begins: the image's start, and its height and width."""
    pixels, known = image.side * image.stride, tokenizer.get_vocab()
    asked = f"Generate an image of {pixels}x{pixels} according to the following prompt:\n{text}"
    words = tokenizer(asked, add_special_tokens=False)["input_ids"]
    size = known.get(LUMINA_SIZE.format(LUMINA_FIRST_SIZE + image.side // LUMINA_UNIT))
    return [tokenizer.bos_token_id, *words, known.get(LUMINA_TURN_END), _chameleon_start(tokenizer), size, size]


def _lumina_null(tokenizer: Any, prompt: list[int], image: Image) -> list[int | None]:
    """The beginning of the answer alone."""
    return [*prompt[-3:]]


def _emu3_image(config: Any, processor: Mapping[str, Any]) -> Image:
    from transformers.models.emu3.modeling_emu3 import Emu3ImageVocabularyMapping

    vq = config.vq_config
    mapping = Emu3ImageVocabularyMapping(config.vocabulary_map or {})
    stride = _stride(vq)
    side = round(processor.get("image_area", EMU3_AREA) ** 0.5 / stride)
    tokens = _tokens_of(config, mapping, vq.codebook_size)
    if mapping.eol_token_id is None:
        raise CheckpointError("config.json: vocabulary_map lacks <|extra_200|>, which ends a row: fetch it again")
    return Image(side, stride, vq.codebook_size, tokens, mapping.eol_token_id, **_normed_by(processor))


def _emu3_parts(model: Any, image: Image, decoder: Path | None) -> Parts:
    own = model.model
    embeddings = own.text_model.embed_tokens.weight.detach()
    codes = embeddings[_index(image.tokens, embeddings)]
    return Parts(own.text_model, codes, _rows(model.lm_head, image.tokens), Emu3Pixels(own.vqmodel, image))


def _emu3_prompt(tokenizer: Any, text: str, image: Image) -> list[int | None]:
    """As the processor with `return_for_image_generation=True`."""
    start, end = (getattr(tokenizer, name, None) for name in ("boi_token", "image_wrapper_token"))
    if tokenizer.bos_token is None or start is None or end is None:
        return [None]
    return list(_ids(tokenizer, f"{tokenizer.bos_token}{text}{start}{image.side}*{image.side}{end}"))


def _emu3_null(tokenizer: Any, prompt: list[int], image: Image) -> list[int | None]:
    return _emu3_prompt(tokenizer, EMU3_NEGATIVE, image)


_ALL = [
    Architecture(
        "janus",
        lambda: transformers.JanusForConditionalGeneration,
        "deepseek-community/Janus-Pro-7B",
        SamplingDefaults(cfg=5.0, image_size=384),
        text=lambda config: config.text_config,
        image=_janus_image,
        parts=_janus_parts,
        prompt=_janus_prompt,
        null=_janus_null,
    ),
    Architecture(
        "chameleon",
        lambda: transformers.ChameleonForConditionalGeneration,
        "leloy/Anole-7b-v0.1-hf",
        SamplingDefaults(cfg=3.0, temperature=0.7, top_p=0.9, image_size=512),
        text=lambda config: config,
        image=_chameleon_image,
        parts=_chameleon_parts,
        prompt=_chameleon_prompt,
        null=_chameleon_null,
        decoder_files=CHAMELEON_DECODER,
    ),
    Architecture(
        LUMINA,
        _lumina_class,
        "Alpha-VLLM/Lumina-mGPT-7B-768",
        SamplingDefaults(cfg=4.0, top_k=2000, image_size=768),
        text=lambda config: config,
        image=_lumina_image,
        parts=_lumina_parts,
        prompt=_lumina_prompt,
        null=_lumina_null,
        decoder_files=CHAMELEON_DECODER,
    ),
    Architecture(
        "emu3",
        lambda: transformers.Emu3ForConditionalGeneration,
        "Emu3-community/Emu3-Gen-hf",
        SamplingDefaults(cfg=3.0, top_k=2048, image_size=720),
        text=lambda config: config.text_config,
        image=_emu3_image,
        parts=_emu3_parts,
        prompt=_emu3_prompt,
        null=_emu3_null,
    ),
]
ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}


def name_of(config: Mapping[str, Any]) -> str:
    """The name of the architecture that a folder's config.json is of, whether hosted or not."""
    model_type = str(config.get("model_type"))
    return LUMINA if model_type == "chameleon" and LUMINA_MARK in config else model_type
