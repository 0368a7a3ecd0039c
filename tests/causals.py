"""Golden tensors of SphereAR and BitDance, and the small models in them."""

from __future__ import annotations

from dataclasses import replace

import torch
from golden_files import Golden
from torch import Tensor

from cspd import noise
from cspd.causal.autoencoders import BitAutoencoder, BitAutoencoderConfig, SphereVAE, SphereVAEConfig
from cspd.causal.models import Causal, CausalConfig
from cspd.causal.registry import AUTOENCODERS, CAUSALS, CausalDefaults, CausalSpec
from mar.checkpoint import _shapes

NAMES = ("sphere", "bitdance", "bitdance_4x", "bitdance_16x")
LABELS, SEEDS, STEPS = torch.tensor([3, 7]), torch.tensor([1, 2]), 12
SPHERE_VAE = SphereVAEConfig(8, 64, (64, 8, 16, 64), encoder_layers=1, decoder_layers=1, side=4)
BIT_AUTOENCODER = BitAutoencoderConfig(8, 32, (2, 1, 1), num_res_blocks=1)


def chain_normals(seed: Tensor, position: Tensor, channels: int) -> Tensor:
    """x_0 and the noise of each step, [STEPS + 1, R, channels], of chains with seeds and positions int64 [R]."""
    step = torch.arange(STEPS, 0, -1)
    return torch.cat([noise.initial(seed, position, channels)[None], noise.steps(seed, position, step, channels)])


def normals_of(token: int, num_rows: int, length: int, channels: int) -> Tensor:
    """`chain_normals` of a token of the golden samples; of rows beyond the labels it is the null row's own first."""
    own = torch.full_like(SEEDS, token)
    position = torch.cat([own, torch.full_like(SEEDS, length)])[:num_rows]
    return chain_normals(SEEDS.repeat(2)[:num_rows], position, channels)


def config_of(settings: dict, binary: bool) -> CausalConfig:
    """The sizes in a golden file."""
    shared = ("dim", "n_layer", "n_head", "diff_dim", "diff_layers", "diff_adanln_layers", "latent_dim")
    own = {name: settings[name] for name in (*shared, "cls_token_num", "num_classes")}
    stride = settings["down_size" if binary else "patch_size"]
    own |= {"parallel_num": settings.get("parallel_num", 1), "side": settings["resolution"] // stride}
    return CausalConfig(**own, binary=binary, stride=stride)


class CausalGolden(Golden):
    """A golden file with its model and autoencoder."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}.safetensors")
        binary = name != "sphere"
        self.model = Causal(config_of(self.config, binary)).eval().requires_grad_(False)
        self.model.load_state_dict({key: self.weights[key] for key in self.weights if not key.startswith("vae.")})
        vae = BitAutoencoder(BIT_AUTOENCODER) if binary else SphereVAE(SPHERE_VAE)
        self.vae = vae.eval().requires_grad_(False)
        inside = {key.removeprefix("vae."): self.weights[key] for key in self.weights if key.startswith("vae.")}
        self.vae.load_state_dict(inside)

    def normals(self, token: int, num_rows: int) -> Tensor:
        """The noise of a token and a number of rows: [STEPS + 1, rows, d], x_0 first."""
        return normals_of(token, num_rows, self.model.config.seq_len, self.model.config.token_dim)

    def conditions(self, kind: str) -> Tensor:
        """z [L, rows, P dim]: the file's conditions, and the position that is added to them."""
        config = self.model.config
        position = self.model.pos_for_diff.weight.view(config.seq_len, 1, config.parallel_num, -1)
        return (self[f"{kind}.conditions"] + position).flatten(2)

    def tokens(self, kind: str) -> Tensor:
        """The tokens [L, rows, d], the unconditional rows last."""
        return self[f"{kind}.heads"].float().flatten(2)


def small_sphere() -> tuple[Causal, SphereVAE]:
    """A SphereAR of 4 tokens and its autoencoder, with random weights."""
    golden = CausalGolden("sphere")
    torch.manual_seed(0)
    models = Causal(replace(golden.model.config, side=2)), SphereVAE(replace(SPHERE_VAE, side=2))
    for model in models:
        model.eval().requires_grad_(False)
    return models


def named(golden: CausalGolden, monkeypatch) -> None:
    """Gives a golden file's sizes a name, for the duration of a test."""
    spec = CausalSpec(golden.model.config, CausalDefaults(cfg=3.0, num_sampling_steps=STEPS))
    monkeypatch.setitem(CAUSALS, "golden", spec)
    monkeypatch.setitem(AUTOENCODERS, "golden", golden.vae.config)
    _shapes.cache_clear()
