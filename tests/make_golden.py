"""Makes golden files with the authors' own code, whose clones are given:

    python tests/make_golden.py --sphere SphereAR --bitdance BitDance --mar mar --llamagen LlamaGen
    python tests/make_golden.py --heads BitDance NextStep-1 vllm-omni

Weights, noise and images are drawn by `cspd.noise`, so that the files need to hold the outputs only. MAR's weights are
those of a bundled draft model, which is trained. It runs on a CPU in float32, without the compiler.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported
sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch
from causals import LABELS, STEPS, normals_of
from golden_files import CODES, GOLDEN, GOLDEN_MAR, IMAGES, SAMPLE_SETTINGS, drawn, drawn_weights
from safetensors.torch import load_file, save_file
from seams import CHANNELS, COND, GOLDEN_RUNS, PARALLEL, golden_inputs
from torch import Tensor, nn
from torch.nn import functional as F

from cspd import noise

SHARED = {"dim": 32, "n_layer": 2, "n_head": 2, "diff_layers": 4, "diff_adanln_layers": 2, "latent_dim": 8}
SHARED |= {"diff_batch_mul": 1, "cls_token_num": 4, "num_classes": 10}
SPHERE = SHARED | {"diff_dim": 48, "patch_size": 8, "resolution": 32}
BIT = SHARED | {"diff_dim": 48, "down_size": 4, "patch_size": 1, "resolution": 16}
BIT_4X = BIT | {"diff_dim": 64, "parallel_num": 4, "parallel_mode": "patch"}  # attention heads have 64 numbers
BIT_16X = BIT_4X | {"resolution": 32, "parallel_num": 16}
GUIDANCE = {"guided": 3.0, "plain": 1.0}
MAR = {"img_size": 32, "vae_stride": 4, "class_num": 10, "buffer_size": 8, "diffloss_w": 160, "diffloss_d": 2}
MAR |= {f"{part}_embed_dim": 96 for part in ("encoder", "decoder")}
MAR |= {f"{part}_depth": 2 for part in ("encoder", "decoder")}
MAR |= {f"{part}_num_heads": 4 for part in ("encoder", "decoder")}
MAR_LABELS, MAR_SEEDS, COMMITTED = torch.tensor([1, 9]), torch.tensor([0, 1]), 21  # of the 64 tokens
GPT = {"dim": 48, "n_layer": 2, "n_head": 4, "multiple_of": 32, "vocab_size": 96, "block_size": 16, "num_classes": 10}
TABLES = ("betas", "alphas_cumprod", "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod", "posterior_mean_coef1")
TABLES += ("posterior_mean_coef2", "posterior_log_variance_clipped", "timestep_map")


def fill(model: nn.Module) -> dict[str, list[int]]:
    """Draws the parameters of a model; returns their shapes by name."""
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    model.load_state_dict(drawn_weights(shapes), strict=False)
    model.eval().requires_grad_(False)
    return shapes


def save(name: str, config: dict, shapes: dict, tensors: dict[str, Tensor]) -> None:
    metadata = {"config": json.dumps(config), "shapes": json.dumps(shapes)}
    save_file({key: value.contiguous() for key, value in tensors.items()}, GOLDEN / f"{name}.safetensors", metadata)
    print(f"{name}: {sum(value.nbytes for value in tensors.values()):,} bytes of outputs")


class Draws:
    """Stands for the module torch in the authors' sampler: normals come from `cspd.noise`."""

    def __init__(self) -> None:
        self.of_token: Iterator[Tensor] = iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def randn(self, *shape: Any, **kwargs: Any) -> Tensor:
        return next(self.of_token).reshape(*shape)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.randn(x.shape)


def sampled(model: nn.Module, sampling: types.ModuleType) -> dict[str, Tensor]:
    """What the authors' sampler computes: z before positions are added, tokens, and images, guided and plain."""
    head_sample, draws, outputs = model.head_sample, Draws(), {}
    sampling.torch = draws  # type: ignore[attr-defined]
    num_cells = getattr(model, "parallel_num", 1)
    length, channels = model.h * model.w // num_cells, num_cells * model.latent_dim
    for kind, cfg in GUIDANCE.items():
        conditions, tokens = [], []

        def recorded(x: Tensor, token: int, *settings: Any) -> Tensor:
            num_rows = len(LABELS) if token or cfg == 1 else len(x)  # noqa: B023
            draws.of_token = iter(normals_of(token, num_rows, length, channels))
            made = head_sample(x, token, *settings)
            conditions.append(x)  # noqa: B023
            tokens.append(made)  # noqa: B023
            return made

        model.head_sample = recorded
        images = model.sample(LABELS, STEPS, cfg)
        outputs[f"{kind}.conditions"], outputs[f"{kind}.images"] = torch.stack(conditions), images
        outputs[f"{kind}.heads"] = torch.stack(tokens)
    return outputs


def make_sphere(path: Path) -> None:
    sys.path.insert(0, str(path))
    from SphereAR import model as authors
    from SphereAR import sampling

    small = {"z_channels": 64, "cnn_chs": [64, 8, 16, 64], "encoder_vit_layers": 1, "decoder_vit_layers": 1}
    authors.VAE = functools.partial(authors.VAE, **small)
    model = authors.SphereAR(**SPHERE)
    shapes = fill(model)
    image = drawn(IMAGES, (1, 3, 32, 32))
    outputs = sampled(model, sampling)
    outputs |= {"encode.moments": model.vae.quant_proj(model.vae.encoder(image))}
    buffers = {f"model.{name}": value for name, value in model.state_dict().items() if name not in shapes}
    save("sphere", SPHERE, shapes, outputs | buffers)


def make_bitdance(path: Path) -> None:
    sys.path.insert(0, str(path / "imagenet_gen"))
    from src import model as single
    from src import model_parallel as parallel
    from src import sampling, sampling_parallel

    small = {"ch": 32, "ch_mult": [2, 1, 1], "num_res_blocks": 1}
    for name, config in {"bitdance": BIT, "bitdance_4x": BIT_4X, "bitdance_16x": BIT_16X}.items():
        authors, own_sampling = (single, sampling) if name == "bitdance" else (parallel, sampling_parallel)
        of_size = authors.VQModel
        authors.VQModel = lambda sizes, num_codebooks: of_size(sizes | small, num_codebooks)  # noqa: B023
        model = authors.BitDance(**config)
        authors.VQModel = of_size
        shapes = fill(model)
        image = drawn(IMAGES, (1, 3, config["resolution"], config["resolution"]))
        outputs = sampled(model, own_sampling)
        outputs |= {"encode.codes": model.vae.encode(image)[0]}
        save(name, config, shapes, outputs)


def make_mar(path: Path) -> None:
    sys.path.insert(0, str(path))
    from diffusion import create_diffusion
    from models import mar as authors

    torch.Tensor.cuda = lambda values: values  # type: ignore[method-assign, assignment]
    model = authors.MAR(**MAR, norm_layer=functools.partial(nn.LayerNorm, eps=1e-6)).eval()
    model.load_state_dict(load_file(GOLDEN_MAR))
    outputs = mar_parts(model)
    for num_steps in (100, 25):
        tables = create_diffusion(timestep_respacing=str(num_steps), noise_schedule="cosine")
        outputs |= {f"schedule{num_steps}.{name}": torch.tensor(getattr(tables, name)) for name in TABLES}
    for name, settings in SAMPLE_SETTINGS.items():
        outputs[f"sample.tokens.{name}"] = mar_tokens(model, settings)
    outputs |= {"sample.labels": MAR_LABELS.clone(), "sample.seeds": MAR_SEEDS}
    save("mar_small", MAR, {}, outputs)


def mar_parts(model: nn.Module) -> dict[str, Tensor]:
    """Inputs and outputs of the authors' transformer, head and posterior."""
    num, length, width = len(MAR_LABELS), model.seq_len, MAR["decoder_embed_dim"]
    tokens = drawn(IMAGES, (num, length, 16))
    mask = torch.ones(num, length).scatter(1, drawn(CODES, (num, length)).argsort(1)[:, :COMMITTED], 0.0)
    outputs = {"backbone.tokens": tokens, "backbone.mask": mask, "backbone.labels": MAR_LABELS}
    for name, embedding in (("z", model.class_emb(MAR_LABELS)), ("z_uncond", model.fake_latent.repeat(num, 1))):
        encoded = model.forward_mae_encoder(tokens, mask, embedding)
        outputs[f"backbone.{name}"] = model.forward_mae_decoder(encoded, mask)
        outputs.setdefault("backbone.encoder_out", encoded)

    head, t = model.diffloss.net, torch.tensor([127, 808, 344, 970, 260, 240, 313])
    x, c = drawn(IMAGES + 1, (7, 16)), drawn(CODES + 1, (7, width))
    outputs |= {"head.x": x, "head.t": t, "head.c": c, "head.out": head(x, t, c)}
    x, t, c = drawn(IMAGES + 2, (8, 16)), torch.full((8,), 431), drawn(CODES + 2, (8, width))
    outputs |= {"head_cfg.x": x, "head_cfg.t": t, "head_cfg.c": c, "head_cfg.scale": torch.tensor(2.7)}
    outputs["head_cfg.out"] = head.forward_with_cfg(x, t, c, 2.7)

    step, x, c = torch.tensor([0, 1, 37, 80, 99]), drawn(IMAGES + 3, (5, 16)), drawn(CODES + 3, (5, width))
    outputs |= {"posterior.step": step, "posterior.x": x, "posterior.c": c}
    found = model.diffloss.gen_diffusion.p_mean_variance(head, x, step, clip_denoised=False, model_kwargs={"c": c})
    names = {"mean": "mean", "log_variance": "log_variance", "pred_x0": "pred_xstart"}
    return outputs | {f"posterior.{name}": found[theirs] for name, theirs in names.items()}


def mar_tokens(model: nn.Module, settings: dict) -> Tensor:
    """Tokens [2, L, d] by the authors' sampler, with the orders and the noise of requests with `MAR_SEEDS`."""
    from diffusion import gaussian_diffusion
    from models import diffloss

    draws = diffloss.torch = gaussian_diffusion.th = Draws()  # type: ignore[attr-defined]
    orders = noise.order(MAR_SEEDS, model.seq_len).flip(1)  # the authors' orders are consumed from their end
    branches = 1 if settings["cfg"] == 1 else 2
    authors_sample, num_masked = model.diffloss.sample, model.seq_len

    def sample(z: Tensor, *own: Any) -> Tensor:
        nonlocal num_masked
        num = len(z) // (branches * len(orders))
        position = orders[:, num_masked - num : num_masked].sort(1).values.flatten()
        num_masked -= num
        seed = MAR_SEEDS.repeat_interleave(num)
        steps = noise.steps(seed, position, torch.arange(99, -1, -1), 16).repeat(1, branches, 1)
        draws.of_token = iter([noise.initial(seed, position, 16), *steps])
        return authors_sample(z, *own)

    model.diffloss.sample, model.sample_orders = sample, lambda rows: orders
    latents = model.sample_tokens(len(orders), labels=MAR_LABELS, **settings)
    model.diffloss.sample = authors_sample
    return model.patchify(latents)


def make_kl_vae(path: Path) -> None:
    sys.path.insert(0, str(path))
    from models.vae import AutoencoderKL, Decoder, Encoder

    config = {"ch": 32, "ch_mult": [1, 2], "embed_dim": 4, "resolution": 16, "attn_resolution": 8}
    model = AutoencoderKL(4, (1, 2))
    sizes = {"ch": 32, "ch_mult": (1, 2), "resolution": 16, "z_channels": 4}
    model.encoder, model.decoder = Encoder(**sizes, attn_resolutions=(8,)), Decoder(**sizes)
    shapes = fill(model)
    image, latent = drawn(IMAGES, (2, 3, 16, 16)), drawn(CODES, (2, 4, 8, 8))
    posterior = model.encode(image)
    outputs = {"image": image, "posterior.mean": posterior.mean, "posterior.logvar": posterior.logvar}
    save("kl_vae_small", config, shapes, outputs | {"latent": latent, "decoded": model.decode(latent)})


def make_vq(path: Path) -> None:
    sys.path.insert(0, str(path))
    from tokenizer.tokenizer_image import vq_model as authors

    config = {"ch": 32, "ch_mult": [1, 2], "z_channels": 32, "codebook_size": 64, "codebook_dim": 8}
    for name in ("Encoder", "Decoder"):
        setattr(authors, name, functools.partial(getattr(authors, name), ch=32))
    sizes = authors.ModelArgs(64, 8, codebook_show_usage=False, z_channels=32)
    sizes.encoder_ch_mult = sizes.decoder_ch_mult = [1, 2]
    model = authors.VQModel(sizes)
    shapes = fill(model)
    image = drawn(IMAGES, (2, 3, 16, 16))
    quantized, _, (*_, indices) = model.encode(image)
    codes = (16 * drawn(CODES, (2, 64)) + 32).long()
    outputs = {"image": image, "encoded_indices": indices, "quantized": quantized, "codes": codes}
    decoded = model.decode_code(codes.flatten(), (2, 8, 8, 8))
    save("vq_small", config, shapes, outputs | {"decoded": decoded})


def make_gpt(path: Path) -> None:
    sys.path.insert(0, str(path))
    from autoregressive.models import gpt as authors
    from autoregressive.models.generate import generate

    model = authors.Transformer(authors.ModelArgs(**GPT))
    shapes = fill(model)
    labels, length = torch.tensor([3, 5, 5]), GPT["block_size"]
    tokens = (GPT["vocab_size"] * (drawn(CODES, (3, length)) / 12**0.5 + 0.5)).long()
    position = torch.arange(length)
    outputs = {"labels": labels, "tokens": tokens, "logits": model(tokens[:, :-1], labels, position)[0]}
    null = torch.full_like(labels, model.num_classes)
    outputs["logits_uncond"] = model(tokens[:, :-1], null, position)[0]
    outputs["greedy_cfg2"] = generate(model, labels, length, cfg_scale=2.0, sample_logits=False).long()
    save("gpt_small", GPT, shapes, outputs)


def module_at(name: str, path: Path, **packages: dict[str, Any]) -> types.ModuleType:
    """A module of a clone, from its file alone, with small modules in place of what it imports."""
    for package, attributes in packages.items():
        sys.modules[package] = types.SimpleNamespace(**attributes)  # type: ignore[assignment]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_heads(bitdance: Path, nextstep: Path, vllm_omni: Path) -> None:
    """Tokens of NextStep-1's heads and of BitDance's text-to-image heads, see `seams.golden_inputs`."""
    kept = {"nextstep.utils.compile_utils": {"smart_compile": lambda **_: lambda function: function}}
    kept |= {"nextstep": {}, "nextstep.utils": {}, "nextstep.utils.misc": {"LargeInt": int}}
    older = module_at("nextstep_heads", nextstep / "nextstep/models/modeling_fm_head.py", **kept)
    layers = "vllm_omni.model_executor.layers"
    parents: dict[str, dict] = {"vllm_omni": {}, "vllm_omni.model_executor": {}, layers: {}}
    module_at(f"{layers}.timestep_embedding", vllm_omni / layers.replace(".", "/") / "timestep_embedding.py", **parents)
    newer = "vllm_omni/diffusion/models/nextstep_1_1/modeling_nextstep_heads.py"
    modules = {"nextstep": older, "nextstep_1_1": module_at("newer_heads", vllm_omni / newer)}
    folder = bitdance / "modeling/vision_head"
    sampling = module_at("vision_head.sampling_x", folder / "sampling_x.py", vision_head={"__path__": []})
    parallel = module_at("vision_head.flow_head_parallel_x", folder / "flow_head_parallel_x.py")
    heads = {code: (each, each.FlowMatchingHead(CHANNELS, COND, 16, 2)) for code, each in modules.items()}
    for code, (cells, use_swiglu, shift) in PARALLEL.items():
        own = {"parallel_num": cells, "use_swiglu": use_swiglu, "time_shift": shift}
        heads[code] = sampling, parallel.DiffHead(CHANNELS, COND, 128, 2, 1, **own)
    outputs, draws = {}, Draws()
    for code, (module, head) in heads.items():
        fill(head)
        module.torch = draws  # type: ignore[attr-defined]
        for kind, settings in GOLDEN_RUNS[code].items():
            c, noise = golden_inputs(code, kind)
            draws.of_token = iter(noise)
            outputs[f"{code}.{kind}"] = head.sample(c, **settings)
    save("heads", {}, {}, outputs)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout_p: float = 0.0) -> Tensor:
    """In place of flash-attn's, which needs a GPU; [B, N, heads, d]."""
    q, k, v = (values.transpose(1, 2) for values in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def main() -> None:
    makers = {"sphere": [make_sphere], "bitdance": [make_bitdance]}
    makers |= {"mar": [make_mar, make_kl_vae], "llamagen": [make_gpt, make_vq]}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in makers:
        parser.add_argument(f"--{name}", type=Path, help="a clone of the authors' repository")
    names = ("BITDANCE", "NEXTSTEP", "VLLM_OMNI")
    parser.add_argument("--heads", type=Path, nargs=3, metavar=names, help="clones, for the heads alone")
    given = parser.parse_args()
    sys.modules["flash_attn"] = types.SimpleNamespace(flash_attn_func=attention)  # type: ignore[assignment]
    torch.set_grad_enabled(False)
    for name, functions in makers.items():
        for make in functions:
            if getattr(given, name):
                make(getattr(given, name))
    if given.heads:
        make_heads(*given.heads)


if __name__ == "__main__":
    main()
