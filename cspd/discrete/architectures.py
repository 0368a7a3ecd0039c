"""The `transformers` models that `VQRunner` runs. Imported only when one is loaded, since it needs `transformers`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, ChameleonConfig, ChameleonForConditionalGeneration
from transformers.models.chameleon.modeling_chameleon import ChameleonImageVocabularyMapping, ChameleonLayerNorm

from cspd.discrete.registry import CHAMELEON_DECODER, Architecture, HFConfig, Image, Parts, VQDefaults
from cspd.transformer import CacheView
from mar.tensors import CheckpointError, read_tensors
from mar.vae import Decoder, KLConfig

# Lumina-mGPT's weights differ from those of `transformers`' Chameleon in the norms of queries and keys.


class SharedNorms(ChameleonForConditionalGeneration):
    """A Chameleon that Lumina-mGPT's weights load into: groups of heads share the norms of queries and keys.

    There are `model_parallel_size` groups. `spread_norms` gives it the form that `transformers` computes with.
    """

    def __init__(self, config: ChameleonConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            shape = (config.model_parallel_size, layer.self_attn.head_dim)
            layer.self_attn.q_norm = ChameleonLayerNorm(shape)
            layer.self_attn.k_norm = ChameleonLayerNorm(shape)


@torch.no_grad()
def spread_norms(model: Any) -> None:
    """Copies the norms that a group of a Chameleon's heads shares to each of its heads."""
    for layer in model.model.layers:
        attention = layer.self_attn
        _repeat_for_heads(attention.q_norm, attention.num_heads)
        _repeat_for_heads(attention.k_norm, attention.num_key_value_heads)


def _repeat_for_heads(norm: nn.Module, num_heads: int) -> None:
    for name in ("weight", "bias"):
        shared = getattr(norm, name)
        own = shared.repeat_interleave(num_heads // len(shared), dim=0)
        setattr(norm, name, nn.Parameter(own, requires_grad=False))


# A `transformers` model in place of LlamaGen's GPT: its own layers, with the masks, positions and cache of `VQRunner`.


class SlotCache(Cache):
    """A view of a model runner's cache behind the interface of `transformers`."""

    def __init__(self, view: CacheView) -> None:
        super().__init__(layers=[])
        self.view = view

    def update(  # type: ignore[override]
        self, key: Tensor, value: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """As `CacheView.update`."""
        return self.view.update(layer, key, value)


class HFModel(nn.Module):
    """Predicts each VQ token from a prompt and the tokens before it, with the interface of `cspd.discrete.gpt.GPT`.

    `cls_embedding` embeds the tokens of prompts, int64 [B, n], and `tok_embeddings` those of images. The output at the
    prompt's last token predicts token 0, and the output at token i predicts token i + 1. The model computes in the type
    of its weights.
    """

    def __init__(self, config: HFConfig, parts: Parts) -> None:
        super().__init__()
        self.config = config
        decoder: Any = parts.decoder
        self.decoder = decoder
        decoder.set_attn_implementation("sdpa")  # the fastest one that takes any mask
        self.cls_embedding = decoder.get_input_embeddings()
        self.tok_embeddings = nn.Embedding.from_pretrained(parts.codes)
        self.output = parts.output

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    @property
    def own_type(self) -> torch.dtype:
        """The type that the model computes in, whatever `cspd.device.Precision` says."""
        return self.tok_embeddings.weight.dtype

    def table(self, position: Tensor) -> Tensor:
        """The positions themselves, int64 [...]: the layers compute their own rotary angles."""
        return position

    def through(self, x: Tensor, table: Tensor, mask: Tensor | None = None, cache: CacheView | None = None) -> Tensor:
        """As `GPT.through`; table: positions, int64 [B or 1, N]."""
        if mask is None and cache is not None:  # without a mask the layers would be causal among the inputs
            mask = torch.ones(1, 1, x.shape[1], cache.width, dtype=torch.bool, device=x.device)
        slots = None if cache is None else SlotCache(cache)
        output = self.decoder(
            inputs_embeds=x,
            position_ids=table,
            attention_mask=mask,
            past_key_values=slots,
            use_cache=slots is not None,
        )
        return output.last_hidden_state


# The VQ models of `transformers` in place of LlamaGen's tokenizer, between images and codes.


@dataclass(frozen=True)
class PixelsConfig:
    """codebook_size: V, entries of the codebook. stride: pixels per token, along a side."""

    codebook_size: int
    stride: int


class Pixels(nn.Module):
    """Images [B, 3, H, W] in -1..1 to tokens [B, L] in raster order, and back, computed in float32.

    Args:
        vqmodel: of `transformers`; it is converted to float32. image: the format of its images.
    """

    def __init__(self, vqmodel: Any, image: Image) -> None:
        super().__init__()
        self.config = PixelsConfig(image.num_codes, image.stride)
        self.image = image
        self.vqmodel = vqmodel.float()

    @property
    def quantize(self) -> nn.Module:
        """The module whose `embedding` is the codebook as it is stored."""
        return self.vqmodel.quantize

    @property
    def codebook(self) -> Tensor:
        """The vectors [V, c] that the decoder receives."""
        return self.quantize.get_submodule("embedding").get_parameter("weight")

    def encode(self, image: Tensor) -> Tensor:
        tokens = self.vqmodel.encode(self._normed(image)).image_tokens
        return tokens.view(len(image), -1)

    def _normed(self, image: Tensor) -> Tensor:
        """Pixels in -1..1, normalised as the VQ model expects them."""
        mean = image.new_tensor(self.image.mean).view(3, 1, 1)
        std = image.new_tensor(self.image.std).view(3, 1, 1)
        return ((image + 1) / 2 - mean) / std

    def _in_range(self, image: Tensor) -> Tensor:
        """The inverse of `_normed`."""
        mean = image.new_tensor(self.image.mean).view(3, 1, 1)
        std = image.new_tensor(self.image.std).view(3, 1, 1)
        return (image * std + mean) * 2 - 1

    def _in_rows(self, codes: Tensor) -> Tensor:
        """Tokens [B, L] as [B, side, side]."""
        return codes.unflatten(1, (self.image.side, self.image.side))


class JanusPixels(Pixels):
    @property
    def codebook(self) -> Tensor:
        return functional.normalize(super().codebook, dim=-1)

    def decode(self, codes: Tensor) -> Tensor:
        return self._in_range(self.vqmodel.decode(codes))


class ChameleonPixels(Pixels):
    """Chameleon's VQ model. `transformers` has only its encoder, so the decoder is read from Chameleon's own file.

    Args:
        decoder: the file `vqgan.ckpt` of Chameleon and Anole; its layers are those of latent diffusion.

    Attributes:
        from_file: the names of the encoder's tensors that were read from the file too, since Lumina-mGPT's weights do
            not have them.

    Raises:
        CheckpointError: the file cannot be read, or belongs to another model.
    """

    def __init__(self, vqmodel: Any, image: Image, decoder: Path) -> None:
        super().__init__(vqmodel, image)
        own = vqmodel.config
        config = KLConfig(
            embed_dim=own.latent_channels,
            ch=own.base_channels,
            ch_mult=tuple(own.channel_multiplier),
            num_res_blocks=own.num_res_blocks,
        )
        self.decoder = Decoder(config)
        self.post_quant_conv = nn.Conv2d(own.embed_dim, own.latent_channels, 1)
        tensors = read_tensors(decoder)
        for name in ("decoder", "post_quant_conv"):
            prefix = f"{name}."
            part = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            try:
                getattr(self, name).load_state_dict(part)
            except RuntimeError as error:
                raise CheckpointError(f"{decoder}: not the image decoder of this model ({error})") from error
        # the file has the encoder too, with tensors that the weights of Lumina-mGPT lack
        encoder = {}
        for name, parameter in vqmodel.state_dict().items():
            if name in tensors and tensors[name].shape == parameter.shape:
                encoder[name] = tensors[name]
        vqmodel.load_state_dict(encoder, strict=False)
        self.from_file = encoder.keys()

    def decode(self, codes: Tensor) -> Tensor:
        vectors = self.codebook[self._in_rows(codes)].permute(0, 3, 1, 2)
        return self._in_range(self.decoder(self.post_quant_conv(vectors)))


class Emu3Pixels(Pixels):
    def encode(self, image: Tensor) -> Tensor:
        sizes = torch.tensor([image.shape[-2:]] * len(image))
        tokens = self.vqmodel.encode(self._normed(image), sizes).image_tokens
        return torch.stack(tokens).flatten(1)

    def decode(self, codes: Tensor) -> Tensor:
        return self._in_range(self.vqmodel.decode(self._in_rows(codes)))


# The supported architectures of `transformers`, each with the prompts and tokens that its own code uses.
#
# Sources: `transformers.models.janus`, `.chameleon` and `.emu3`. How the models are sampled:
#     Janus-Pro: Chen et al., arXiv 2501.17811, and `JanusForConditionalGeneration.generate`.
#     Chameleon: arXiv 2405.09818; Anole: Chern et al., arXiv 2407.06135, with Chameleon's own image decoder.
#     Lumina-mGPT: Liu et al., arXiv 2408.02657, and the authors' inference_solver.py and item_processor.py.
#     Emu3: Wang et al., arXiv 2409.18869, and the authors' example of image generation.

EMU3_AREA = 518400  # pixels per image, the default of `Emu3Processor`
EMU3_NEGATIVE = (  # the authors' negative prompt
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality,"
    " low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)

LUMINA = "lumina_mgpt"
LUMINA_MARK = "mask_image_logits"  # a setting that Chameleon's configuration does not have
# special tokens of Lumina-mGPT, by their names in Chameleon's vocabulary
LUMINA_TURN_END = "<reserved08706>"
LUMINA_ROW_END = "<reserved08799>"
LUMINA_SIZE = "<reserved{:05d}>"
LUMINA_FIRST_SIZE = 8800  # the token for a side of 0 codes
LUMINA_UNIT = 2  # codes, along a side, from one size token to the next
LUMINA_NAME = re.compile(r"mGPT-\w+-(\d+)")  # pixels along a side


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text)["input_ids"]


def _special(tokenizer: Any, name: str) -> int | None:
    """The id of a special token, by its attribute of the tokenizer, or None if the tokenizer lacks it."""
    token = getattr(tokenizer, name, None)
    return None if token is None else tokenizer.get_vocab().get(token)


def _stride(vq_config: Any) -> int:
    return 2 ** (len(vq_config.channel_multiplier) - 1)


def _normed_by(processor: Mapping[str, Any]) -> dict[str, Any]:
    """`mean` and `std` of an `Image`, if a model's directory has them."""
    return {name: processor[f"image_{name}"] for name in ("mean", "std") if processor.get(f"image_{name}")}


def _tokens_of(config: Any, mapping: Any, num_codes: int) -> list[int]:
    """The tokens of codes 0, 1, ... in the vocabulary of a configuration."""
    tokens = mapping.img2bpe if config.vocabulary_map else {}
    if len(tokens) != num_codes or sorted(tokens) != list(range(num_codes)):
        raise CheckpointError(
            f"config.json: vocabulary_map names {len(tokens)} image tokens, but the codebook has {num_codes} entries:"
            " use the config.json of a model that generates images, as it is on the Hub"
        )
    return [tokens[code] for code in range(num_codes)]


def _rows(linear: nn.Linear, tokens: list[int]) -> nn.Linear:
    """The part of an output layer that computes the logits of some tokens."""
    # on the meta device, since its random weights are replaced at once
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
    # Janus has a vocabulary of its own for images, with embeddings that an adapter maps to the decoder's width
    codes = torch.arange(image.num_codes, device=own.generation_embeddings.weight.device)
    embeddings = model.prepare_embeddings_for_image_generation(codes)
    return Parts(own.language_model, embeddings, own.generation_head, JanusPixels(own.vqmodel, image))


def _janus_prompt(tokenizer: Any, text: str, image: Image) -> list[int | None]:
    """As the processor with `generation_mode="image"`, for a conversation of one message."""
    if tokenizer.chat_template:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    return [*_ids(tokenizer, text), _special(tokenizer, "boi_token")]


def _janus_null(tokenizer: Any, prompt: list[int], image: Image) -> list[int | None]:
    """As `generate`: all tokens but the first and the image's start are replaced by padding."""
    unchanged = {tokenizer.bos_token_id, _special(tokenizer, "boi_token")}
    return [token if token in unchanged else tokenizer.pad_token_id for token in prompt]


def _chameleon_image(config: Any, processor: Mapping[str, Any]) -> Image:
    vq = config.vq_config
    mapping = ChameleonImageVocabularyMapping(config.vocabulary_map)
    stride = _stride(vq)
    return Image(vq.resolution // stride, stride, vq.num_embeddings, _tokens_of(config, mapping, vq.num_embeddings))


def _chameleon_parts(model: Any, image: Image, decoder: Path | None) -> Parts:
    """`transformers` masks the logits of image tokens after the output layer, so the layer is used without the mask."""
    embeddings = model.model.embed_tokens.weight.detach()
    codes = embeddings[_index(image.tokens, embeddings)]
    pixels = None if decoder is None else ChameleonPixels(model.model.vqmodel, image, decoder)
    return Parts(model.model, codes, _rows(model.lm_head, image.tokens), pixels)


def _chameleon_prompt(tokenizer: Any, text: str, image: Image) -> list[int | None]:
    """As the processor: the text and a separator. Then the start of an image."""
    return [*_ids(tokenizer, text + (tokenizer.sep_token or "")), _chameleon_start(tokenizer)]


def _chameleon_start(tokenizer: Any) -> int | None:
    found = _special(tokenizer, "boi_token")
    return tokenizer.get_vocab().get("<racm3:break>") if found is None else found


def _chameleon_null(tokenizer: Any, prompt: list[int], image: Image) -> list[int | None]:
    return [tokenizer.bos_token_id, _chameleon_start(tokenizer)]


def _lumina_image(config: Any, processor: Mapping[str, Any]) -> Image:
    """Chameleon's codes, in rows that end. All sizes have the same configuration, so the name has to give the size."""
    image = _chameleon_image(config, processor)
    path = Path(config.name_or_path).absolute()
    pixels = LUMINA_NAME.findall(str(path))
    if not pixels:
        raise CheckpointError(
            f"{path}: the size of Lumina-mGPT's images is only in the name of the directory: keep its name on the Hub,"
            " such as Lumina-mGPT-7B-768"
        )
    row_end = config.vocabulary_map.get(LUMINA_ROW_END)
    if row_end is None:
        raise CheckpointError(f"config.json: vocabulary_map lacks {LUMINA_ROW_END}, which ends a row: fetch it again")
    return replace(image, side=int(pixels[-1]) // image.stride, row_end=row_end)


def _lumina_parts(model: Any, image: Image, decoder: Path | None) -> Parts:
    spread_norms(model)
    return _chameleon_parts(model, image, decoder)


def _lumina_prompt(tokenizer: Any, text: str, image: Image) -> list[int | None]:
    """A turn that asks for an image, and how the answer begins: the start of an image, its height and its width."""
    pixels = image.side * image.stride
    asked = f"Generate an image of {pixels}x{pixels} according to the following prompt:\n{text}"
    words = tokenizer(asked, add_special_tokens=False)["input_ids"]
    vocabulary = tokenizer.get_vocab()
    size = vocabulary.get(LUMINA_SIZE.format(LUMINA_FIRST_SIZE + image.side // LUMINA_UNIT))
    answer = [_chameleon_start(tokenizer), size, size]
    return [tokenizer.bos_token_id, *words, vocabulary.get(LUMINA_TURN_END), *answer]


def _lumina_null(tokenizer: Any, prompt: list[int], image: Image) -> list[int | None]:
    """The beginning of the answer without the turn before it."""
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
    start = getattr(tokenizer, "boi_token", None)
    end = getattr(tokenizer, "image_wrapper_token", None)
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
        VQDefaults(cfg=5.0, image_size=384),
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
        VQDefaults(cfg=3.0, temperature=0.7, top_p=0.9, image_size=512),
        text=lambda config: config,
        image=_chameleon_image,
        parts=_chameleon_parts,
        prompt=_chameleon_prompt,
        null=_chameleon_null,
        decoder_files=CHAMELEON_DECODER,
    ),
    Architecture(
        LUMINA,
        lambda: SharedNorms,
        "Alpha-VLLM/Lumina-mGPT-7B-768",
        VQDefaults(cfg=4.0, top_k=2000, image_size=768),
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
        VQDefaults(cfg=3.0, top_k=2048, image_size=720),
        text=lambda config: config.text_config,
        image=_emu3_image,
        parts=_emu3_parts,
        prompt=_emu3_prompt,
        null=_emu3_null,
    ),
]
ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}


def name_of(config: Mapping[str, Any]) -> str:
    """The name of an architecture, supported or not, by the content of config.json."""
    model_type = str(config.get("model_type"))
    return LUMINA if model_type == "chameleon" and LUMINA_MARK in config else model_type
