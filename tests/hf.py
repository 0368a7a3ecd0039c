"""Tiny `transformers` models with random weights, their tokenizers, and sampling with their own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from texts import one_by_one
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    JanusConfig,
    JanusForConditionalGeneration,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from cspd.discrete.architectures import ARCHITECTURES, HFModel, name_of
from cspd.discrete.hf import HFEagle, Prompts, sizes
from cspd.discrete.registry import Image
from mar.vae import Decoder, KLConfig

CODES, SIDE = 16, 4
OF_CHAMELEON = ("chameleon", "lumina_mgpt")  # their decoder to pixels is in another file
GUIDANCE = 2.5
WORDS = "a red fox blue an old ship in quiet green harbour at night 4 * lowres".split()
BOS, EOS, PAD, SEP, START, END, WRAPPER, IMAGE, ROW_END, FRAME_END = (
    "<s> </s> <pad> <sep> <boi> <eoi> <img> <image> <|extra_200|> <eof>".split()
)
SPECIAL = [BOS, EOS, PAD, SEP, START, END, WRAPPER, IMAGE, ROW_END, FRAME_END]
# Lumina-mGPT's tokens: ends of turns and rows, sizes of 2 and 4 codes, and the words of its turn
OF_LUMINA = "<reserved08706> <reserved08799> <reserved08801> <reserved08802>".split()
OF_LUMINA += "Generate image of 4x4 8x8 according to the following prompt :".split()


def image_names(architecture: str, codes: int) -> list[str]:
    """The names of the tokens of codes 0, 1, ... in an architecture's vocabulary."""
    if architecture == "janus":
        return []
    if architecture == "emu3":
        return [f"<|visual token {i:06d}|>" for i in range(codes)]
    return ["IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(i)) + "Z" for i in range(codes)]


PROMPTS = ["a red fox", "blue", "an old ship in a quiet green harbour at night"]
DECODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER |= {"num_key_value_heads": 2, "max_position_embeddings": 128}


def tokenizer_of(architecture: str, codes: int = CODES) -> PreTrainedTokenizerFast:
    """A tokenizer of words and special tokens; the tokens of codes are permuted."""
    names = image_names(architecture, codes)
    images = [names[(5 * i + 3) % codes] for i in range(len(names))]
    more = OF_LUMINA if architecture == "lumina_mgpt" else []
    vocabulary = {name: i for i, name in enumerate([*SPECIAL, *images, *WORDS, *more])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
    if architecture != "emu3":  # its processor writes the first token into the text
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
        )
    named = {"boi_token": START, "eoi_token": END, "image_token": IMAGE, "image_wrapper_token": WRAPPER}
    named |= {"eof_token": FRAME_END, "eol_token": ROW_END}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        sep_token=SEP,
        extra_special_tokens=named,
        additional_special_tokens=SPECIAL[4:],
    )


def is_shared(name: str) -> bool:
    """Whether groups of Lumina-mGPT's heads share a parameter."""
    return ".q_norm." in name or ".k_norm." in name


def model_of(architecture: str, seed: int = 0, codes: int = CODES, side: int = SIDE, **more: int) -> PreTrainedModel:
    """A model with large random weights, so that its distributions are uneven."""
    torch.manual_seed(seed)
    vocabulary = tokenizer_of(architecture, codes).get_vocab()
    decoder = DECODER | {"vocab_size": len(vocabulary), "pad_token_id": vocabulary[PAD]} | more
    convolutions = {"base_channels": 32, "num_res_blocks": 1}
    if architecture == "janus":
        vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1.0, "depth": 1}
        vision |= {"image_size": 2 * side, "patch_size": 2, "projection_dim": 32, "num_image_tokens": side * side}
        vq = {"embed_dim": 4, "num_embeddings": codes, "latent_channels": 32, "channel_multiplier": [1, 1]}
        vq |= {"projection_dim": decoder["hidden_size"], "image_token_embed_dim": decoder["hidden_size"]}
        config = JanusConfig(
            text_config={"model_type": "llama", **decoder},
            vision_config=vision,
            vq_config=vq | convolutions,
            image_token_id=vocabulary[IMAGE],
        )
        model = JanusForConditionalGeneration(config)
        generation = model.generation_config
        generation.generation_kwargs = {"boi_token_id": vocabulary[START]}
        generation.bos_token_id, generation.pad_token_id = vocabulary[BOS], vocabulary[PAD]
    elif architecture in OF_CHAMELEON:
        vq = {"embed_dim": 8, "num_embeddings": codes, "latent_channels": 32, "channel_multiplier": [1, 1]}
        vq |= {"resolution": 2 * side}
        config = ChameleonConfig(vq_config=vq | convolutions, vocabulary_map=vocabulary, **decoder)
        if architecture == "lumina_mgpt":  # settings of its authors' own class
            config.model_parallel_size, config.mask_image_logits = decoder["num_key_value_heads"], False
            config.name_or_path = f"Lumina-mGPT-7B-{2 * side}"
        model = ChameleonForConditionalGeneration(config)
    else:
        ends = {"bos_token_id": vocabulary[BOS], "eos_token_id": vocabulary[EOS]}
        vq = {"codebook_size": codes, "channel_multiplier": [1, 1], "attn_resolutions": [], "hidden_size": 32}
        config = Emu3Config(vq_config=vq | convolutions, text_config=decoder | ends, vocabulary_map=vocabulary)
        model = Emu3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "vqmodel" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if architecture == "lumina_mgpt" and is_shared(name):
                heads = len(parameter) // config.model_parallel_size
                parameter.copy_(parameter[::heads].repeat_interleave(heads, 0))
    return model.eval()


def hf_of(model: PreTrainedModel, **more: int) -> tuple[HFModel, Prompts, Image]:
    """A model in the form that `VQRunner` takes; `more`: the sizes that `model_of` was called with."""
    architecture = ARCHITECTURES[name_of(model.config.to_dict())]
    area = (2 * more.get("side", SIDE)) ** 2
    image = architecture.image(model.config, {"image_area": area})
    config = sizes(model.config, architecture, image)
    tokenizer = tokenizer_of(architecture.name, image.num_codes)
    target = HFModel(config, architecture.parts(model, image, None)).requires_grad_(False)
    return target, Prompts(tokenizer, architecture, image), image


def drafter_of(target: HFModel) -> HFEagle:
    """An EAGLE drafter with random weights."""
    torch.manual_seed(5)
    return HFEagle(target.config).eval().requires_grad_(False)


def plain_logits(model: PreTrainedModel, image: Image, prompt: Tensor, codes: Tensor) -> Tensor:
    """Logits [B, V] of the code after a prompt's tokens [n] and codes [B, N], by one call of the model's own layers."""
    inner, prompts = model.model, prompt.expand(len(codes), -1)
    if model.config.model_type == "janus":
        embedded = [model.get_input_embeddings()(prompts)]
        if codes.shape[1]:
            embedded.append(model.prepare_embeddings_for_image_generation(codes))
        made = inner.language_model(inputs_embeds=torch.cat(embedded, 1), use_cache=False)
        return inner.generation_head(made.last_hidden_state[:, -1])
    tokens = torch.tensor(image.tokens)
    rows = [tokens[row] for row in codes.split(image.side, 1)]
    if image.row_end is not None:
        rows = [_ended(row, image) for row in rows]
    decoder = getattr(inner, "text_model", inner)
    made = decoder(input_ids=torch.cat([prompts, *rows], 1), use_cache=False)
    return model.lm_head(made.last_hidden_state[:, -1])[:, tokens]


def _ended(row: Tensor, image: Image) -> Tensor:
    """A row [B, n] of tokens, with the token that ends it if it is complete."""
    is_whole = row.shape[1] == image.side
    return torch.cat([row, row.new_full((len(row), is_whole), image.row_end)], 1)


def guided_logits(model: PreTrainedModel, image: Image, prompts: Sequence[Tensor], codes: Tensor, cfg: float) -> Tensor:
    """As `plain_logits`, guided; prompts: the tokens of the prompt, and of the unconditional branch."""
    own, null = (plain_logits(model, image, prompt, codes) for prompt in prompts)
    return null + cfg * (own - null)


def plain_codes(
    model: PreTrainedModel, image: Image, prompts: Sequence[Tensor], cfg: float, uniforms: Tensor | None = None
) -> Tensor:
    """Codes int64 [L], as `one_by_one`."""

    def logits(codes: Tensor) -> Tensor:
        return guided_logits(model, image, prompts, codes.unsqueeze(0), cfg)[0]

    return one_by_one(logits, image.side**2, uniforms)


def generated(model: PreTrainedModel, image: Image, prompts: Sequence[Tensor], cfg: float) -> Tensor:
    """Greedy codes int64 [L] by the model's own `generate`, called as its documentation shows."""
    prompt, null = (tokens.unsqueeze(0) for tokens in prompts)
    common = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "do_sample": False}
    if model.config.model_type == "janus":
        return model.generate(**common, generation_mode="image", guidance_scale=cfg)[0]
    if model.config.model_type == "chameleon":
        model.model.vocabulary_mapping.image_tokens = []  # otherwise their logits are masked

    def allowed(row: int, tokens: Tensor) -> list[int]:
        ends = image.row_end is not None and (len(tokens) - prompt.shape[1]) % (image.side + 1) == image.side
        return [image.row_end] if ends else image.tokens

    guiding = UnbatchedClassifierFreeGuidanceLogitsProcessor(cfg, model, unconditional_ids=null)
    count = image.side**2 + (image.row_end is not None) * (image.side - 1)
    made = model.generate(
        **common,
        logits_processor=LogitsProcessorList([guiding]),
        prefix_allowed_tokens_fn=allowed,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=2,
    )
    code = {token: i for i, token in enumerate(image.tokens)}
    return torch.tensor([code[token] for token in made[0, prompt.shape[1] :].tolist() if token != image.row_end])


def chameleon_decoder(path: Path, encoder: dict[str, Tensor]) -> tuple[Decoder, torch.nn.Conv2d]:
    """Writes a file of Chameleon's form with random weights; returns the decoder and the layer before it."""
    torch.manual_seed(3)
    decoder = Decoder(KLConfig(embed_dim=32, ch=32, ch_mult=(1, 1), num_res_blocks=1))
    before = torch.nn.Conv2d(8, 32, 1)
    state = {f"decoder.{name}": value for name, value in decoder.state_dict().items()}
    state |= {f"post_quant_conv.{name}": value for name, value in before.state_dict().items()}
    torch.save({"state_dict": encoder | state}, path)
    return decoder, before


def saved(root: Path, architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32, **more: int) -> Path:
    """A directory below `root` with the files, and for Lumina-mGPT the name, that the Hub has."""
    folder = root / (f"Lumina-mGPT-7B-{2 * SIDE}" if architecture == "lumina_mgpt" else architecture)
    model = model_of(architecture, seed, **more).to(dtype)
    model.save_pretrained(folder)
    tokenizer_of(architecture).save_pretrained(folder)
    if architecture == "lumina_mgpt":
        file = folder / "model.safetensors"
        weights = load_file(file)
        for name, value in weights.items():
            if is_shared(name):
                weights[name] = value[:: len(value) // model.config.model_parallel_size].contiguous()
        save_file(weights, file, metadata={"format": "pt"})
    if architecture in OF_CHAMELEON:
        chameleon_decoder(folder / "vqgan.ckpt", {})
    if architecture == "emu3":
        (folder / "processor_config.json").write_text(f'{{"image_area": {(2 * SIDE) ** 2}}}')
    return folder
