"""The modules of `transformers`' models as `VQRunner` takes them. Imported on use only: it needs `transformers`."""

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
from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm

from cspd.discrete.gpt import CacheView
from cspd.discrete.registry import CHAMELEON_DECODER, Architecture, HFConfig, Image, Parts, SamplingDefaults
from mar.tensors import CheckpointError, read_tensors
from mar.vae import Decoder, KLConfig

# Lumina-mGPT's weights, where they are not in the form of `transformers`' Chameleon.


class SharedNorms(ChameleonForConditionalGeneration):
    """Chameleon with norms of queries and keys that are shared by groups of heads, to read weights into.

    There are `model_parallel_size` groups. `spread_norms` makes of it what `transformers` computes.
    """

    def __init__(self, config: ChameleonConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            shape = (config.model_parallel_size, layer.self_attn.head_dim)
            layer.self_attn.q_norm = ChameleonLayerNorm(shape)
            layer.self_attn.k_norm = ChameleonLayerNorm(shape)


@torch.no_grad()
def spread_norms(model: Any) -> None:
    """Gives each head of a Chameleon the norms that its group shares; where each has its own, nothing changes."""
    for layer in model.model.layers:
        attention = layer.self_attn
        for norm, heads in ((attention.q_norm, attention.num_heads), (attention.k_norm, attention.num_key_value_heads)):
            for name in ("weight", "bias"):
                shared = getattr(norm, name)
                own = shared.repeat_interleave(heads // len(shared), dim=0)
                setattr(norm, name, nn.Parameter(own, requires_grad=False))


# A model of `transformers` in the place of LlamaGen's GPT: as it is, with our masks, positions and cache.


class SlotCache(Cache):
    """`transformers`' interface to a view of a model runner's cache."""

    def __init__(self, view: CacheView) -> None:
        super().__init__(layers=[])
        self.view = view

    def update(self, key: Tensor, value: Tensor, layer: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Stores keys and values [B, heads, N, head_dim]; returns those that are looked at, [B, heads, width, ...]."""
        return self.view.update(layer, key, value)


class HFModel(nn.Module):
    """Predicts each code from a prompt and the codes before it, as `cspd.discrete.gpt.GPT` does, for `VQRunner`.

    The input at position p is the code before p, and at 0 the prompt's last token; `cls_embedding` makes inputs of
    prompts [B, n], int64, and `tok_embeddings` of codes. It computes in the type of its weights.
    """

    def __init__(self, config: HFConfig, parts: Parts) -> None:
        super().__init__()
        self.config = config
        self.decoder = parts.decoder
        self.decoder.set_attn_implementation("sdpa")  # of those that take any mask the fastest
        self.cls_embedding = self.decoder.get_input_embeddings()
        self.tok_embeddings = nn.Embedding.from_pretrained(parts.codes)
        self.output = parts.output

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    @property
    def own_type(self) -> torch.dtype:
        """What it computes in, whatever the policy is (`cspd.device.Precision`)."""
        return self.tok_embeddings.weight.dtype

    def table(self, position: Tensor) -> Tensor:
        """What the layers take for positions int64 [...] of the prompt's tokens and the codes: these themselves."""
        return position

    def through(self, x: Tensor, table: Tensor, mask: Tensor | None = None, cache: CacheView | None = None) -> Tensor:
        """As `GPT.through`; table: int64 [B or 1, N], see there."""
        if mask is None and cache is not None:  # or else it would be causal among the inputs
            mask = torch.ones(1, 1, x.shape[1], cache.width, dtype=torch.bool, device=x.device)
        slots = None if cache is None else SlotCache(cache)
        made = self.decoder(
            inputs_embeds=x,
            position_ids=table,
            attention_mask=mask,
            past_key_values=slots,
            use_cache=slots is not None,
        )
        return made.last_hidden_state


# The VQ models of `transformers` in the place of LlamaGen's tokenizer, between images and codes.


@dataclass(frozen=True)
class PixelsConfig:
    """codebook_size: V codes. stride: pixels per code, along a side."""

    codebook_size: int
    stride: int


class Pixels(nn.Module):
    """Images [B, 3, H, W] in -1..1 to codes [B, L] in raster order, and back. It computes in float32.

    Args:
        vqmodel: of `transformers`, which becomes float32. image: what the codes are of.
    """

    def __init__(self, vqmodel: Any, image: Image) -> None:
        super().__init__()
        self.config = PixelsConfig(image.num_codes, image.stride)
        self.image = image
        self.vqmodel = vqmodel.float()

    @property
    def quantize(self) -> nn.Module:
        """What has the codebook as it is stored, `embedding`."""
        return self.vqmodel.quantize

    @property
    def codebook(self) -> Tensor:
        """The vectors that the decoder receives [V, c]."""
        return self.quantize.embedding.weight

    def _normed(self, image: Tensor) -> Tensor:
        """Pixels as the VQ model knows them."""
        mean, std = (image.new_tensor(numbers).view(3, 1, 1) for numbers in (self.image.mean, self.image.std))
        return ((image + 1) / 2 - mean) / std

    def _in_range(self, image: Tensor) -> Tensor:
        """Pixels about -1..1 of those of the VQ model."""
        mean, std = (image.new_tensor(numbers).view(3, 1, 1) for numbers in (self.image.mean, self.image.std))
        return (image * std + mean) * 2 - 1


class JanusPixels(Pixels):
    @property
    def codebook(self) -> Tensor:
        return functional.normalize(super().codebook, dim=-1)

    def encode(self, image: Tensor) -> Tensor:
        return self.vqmodel.encode(self._normed(image)).image_tokens.view(len(image), -1)

    def decode(self, codes: Tensor) -> Tensor:
        return self._in_range(self.vqmodel.decode(codes))


class ChameleonPixels(Pixels):
    """`transformers` has an encoder alone; the decoder is that of Chameleon's own file, which has LDM's layers.

    Args:
        decoder: the file, `vqgan.ckpt`, as it lies beside Chameleon's and Anole's weights.

    Attributes:
        from_file: the names of the VQ model's tensors that the file has too, which are taken from it: Lumina-mGPT is
            trained without them.

    Raises CheckpointError where it is another file, or cannot be read.
    """

    def __init__(self, vqmodel: Any, image: Image, decoder: Path) -> None:
        super().__init__(vqmodel, image)
        own = vqmodel.config
        sizes = {
            "ch": own.base_channels,
            "ch_mult": tuple(own.channel_multiplier),
            "num_res_blocks": own.num_res_blocks,
        }
        self.decoder = Decoder(KLConfig(embed_dim=own.latent_channels, **sizes))
        self.post_quant_conv = nn.Conv2d(own.embed_dim, own.latent_channels, 1)
        tensors = read_tensors(decoder)
        for name in ("decoder", "post_quant_conv"):
            part = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
            try:
                getattr(self, name).load_state_dict(part)
            except RuntimeError as error:
                raise CheckpointError(f"{decoder}: not the image decoder of this model ({error})") from error
        encoder = vqmodel.state_dict()
        found = {name: value for name, value in tensors.items() if name in encoder}
        fitting = {name: value for name, value in found.items() if value.shape == encoder[name].shape}
        vqmodel.load_state_dict(fitting, strict=False)
        self.from_file = fitting.keys()

    def encode(self, image: Tensor) -> Tensor:
        return self.vqmodel.encode(self._normed(image)).image_tokens.view(len(image), -1)

    def decode(self, codes: Tensor) -> Tensor:
        side = self.image.side
        vectors = self.codebook[codes].transpose(1, 2).unflatten(2, (side, side))
        return self._in_range(self.decoder(self.post_quant_conv(vectors)))


class Emu3Pixels(Pixels):
    def encode(self, image: Tensor) -> Tensor:
        sizes = torch.tensor([image.shape[-2:]] * len(image))
        return torch.stack(self.vqmodel.encode(self._normed(image), sizes).image_tokens).flatten(1)

    def decode(self, codes: Tensor) -> Tensor:
        side = self.image.side
        return self._in_range(self.vqmodel.decode(codes.unflatten(1, (side, side))))


# The architectures of `transformers` that are hosted, by what its own code does with them.
#
# Sources: `transformers.models.janus`, `.chameleon` and `.emu3`; how they are sampled:
#     Janus-Pro: Chen et al., arXiv 2501.17811, and `JanusForConditionalGeneration.generate`.
#     Chameleon: arXiv 2405.09818, and Anole: Chern et al., arXiv 2407.06135, by Chameleon's own image decoder.
#     Lumina-mGPT: Liu et al., arXiv 2408.02657, and the authors' inference_solver.py and item_processor.py.
#     Emu3: Wang et al., arXiv 2409.18869, and the authors' example of image generation.

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

    return SharedNorms


def _lumina_parts(model: Any, image: Image, decoder: Path | None) -> Parts:

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
