"""Makes golden files with the authors' own code, whose clones are given:

    python tests/make_golden.py --sphere SphereAR --bitdance BitDance --mar mar --llamagen LlamaGen
    python tests/make_golden.py --heads BitDance NextStep-1 vllm-omni

Weights, noise and images are drawn by `cspd.noise`, so that the files need to hold the outputs only. It runs on a CPU
in float32, without the compiler. `mar_small` and `gpt_small` are older files, with their weights inside.
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
from golden_files import GOLDEN, drawn, drawn_weights
from safetensors.torch import save_file
from seams import CHANNELS, COND, GOLDEN_RUNS, PARALLEL, golden_inputs
from torch import Tensor, nn
from torch.nn import functional as F

IMAGES, CODES = 10_000, 20_000  # streams of drawn inputs; weights have the first ones
SHARED = {"dim": 32, "n_layer": 2, "n_head": 2, "diff_layers": 4, "diff_adanln_layers": 2, "latent_dim": 8}
SHARED |= {"diff_batch_mul": 1, "cls_token_num": 4, "num_classes": 10}
SPHERE = SHARED | {"diff_dim": 48, "patch_size": 8, "resolution": 32}
BIT = SHARED | {"diff_dim": 48, "down_size": 4, "patch_size": 1, "resolution": 16}
BIT_4X = BIT | {"diff_dim": 64, "parallel_num": 4, "parallel_mode": "patch"}  # attention heads have 64 numbers
BIT_16X = BIT_4X | {"resolution": 32, "parallel_num": 16}
GUIDANCE = {"guided": 3.0, "plain": 1.0}


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

    def randn(self, shape: list[int], **kwargs: Any) -> Tensor:
        return next(self.of_token).reshape(shape)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.randn(list(x.shape))


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
    outputs |= {"encode.image": image, "encode.moments": model.vae.quant_proj(model.vae.encoder(image))}
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
        outputs |= {"encode.image": image, "encode.codes": model.vae.encode(image)[0]}
        save(name, config, shapes, outputs)


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
    makers = {"sphere": make_sphere, "bitdance": make_bitdance, "mar": make_kl_vae, "llamagen": make_vq}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in makers:
        parser.add_argument(f"--{name}", type=Path, help="a clone of the authors' repository")
    names = ("BITDANCE", "NEXTSTEP", "VLLM_OMNI")
    parser.add_argument("--heads", type=Path, nargs=3, metavar=names, help="clones, for the heads alone")
    given = parser.parse_args()
    sys.modules["flash_attn"] = types.SimpleNamespace(flash_attn_func=attention)  # type: ignore[assignment]
    torch.set_grad_enabled(False)
    for name, make in makers.items():
        if getattr(given, name):
            make(getattr(given, name))
    if given.heads:
        make_heads(*given.heads)


if __name__ == "__main__":
    main()
