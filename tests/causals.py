"""Golden tensors of SphereAR and BitDance, and the small models in them.

The tensors were made by the authors' code, in float32 on a CPU. Its weights and noise were random numbers that float16
represents, so the files hold them as float16; the autoencoder of `bitdance_4x` is that of `bitdance`.
"""

from __future__ import annotations

import torch
from golden_files import Golden
from torch import Tensor

from cspd.causal.autoencoders import BitAutoencoder, BitAutoencoderConfig, SphereVAE, SphereVAEConfig
from cspd.causal.models import Causal, CausalConfig
from cspd.causal.registry import AUTOENCODERS, CAUSALS, CausalSpec, SamplingDefaults
from mar.checkpoint import _shapes

NAMES = ("sphere", "bitdance", "bitdance_4x")
LABELS, STEPS = torch.tensor([3, 7]), 12
SPHERE_VAE = SphereVAEConfig(8, 64, (64, 8, 16, 64), encoder_layers=1, decoder_layers=1, side=4)
BIT_AUTOENCODER = BitAutoencoderConfig(8, 32, (2, 1, 1), num_res_blocks=1)


def config_of(settings: dict, binary: bool) -> CausalConfig:
    """The sizes in a golden file."""
    shared = ("dim", "n_layer", "n_head", "diff_dim", "diff_layers", "diff_adanln_layers", "latent_dim")
    own = {name: settings[name] for name in (*shared, "cls_token_num", "num_classes")}
    stride = settings["down_size" if binary else "patch_size"]
    return CausalConfig(**own, binary=binary, parallel_num=settings.get("parallel_num", 1), side=4, stride=stride)


class CausalGolden(Golden):
    """A golden file with its model and autoencoder."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}.safetensors")
        if name == "bitdance_4x":
            shared = Golden("bitdance.safetensors")
            self.update((key, shared[key]) for key in shared if key.startswith(("weights.vae.", "encode.")))
        self.update((key, value.float()) for key, value in self.items())
        weights = {key.removeprefix("weights."): value for key, value in self.items() if key.startswith("weights.")}
        self.official = weights
        binary = name != "sphere"
        self.model = Causal(config_of(self.config, binary)).eval().requires_grad_(False)
        self.model.load_state_dict({key: value for key, value in weights.items() if not key.startswith("vae.")})
        vae = BitAutoencoder(BIT_AUTOENCODER) if binary else SphereVAE(SPHERE_VAE)
        self.vae = vae.eval().requires_grad_(False)
        own = {key.removeprefix("vae."): value for key, value in weights.items() if key.startswith("vae.")}
        self.vae.load_state_dict(own)

    def normals(self, kind: str):
        """The authors' noise of a token and a number of rows: [STEPS + 1, rows, d], x_0 first."""

        def of_token(token: int, rows: int) -> Tensor:
            noise = self[f"{kind}.noise"][token - 1] if token else self[f"{kind}.noise_first"]
            return noise.reshape(STEPS + 1, rows, -1)

        return of_token

    def conditions(self, kind: str) -> Tensor:
        """z [L, rows, P dim]: the file's conditions, and the position that is added to them."""
        config = self.model.config
        position = self.model.pos_for_diff.weight.view(config.seq_len, 1, config.parallel_num, -1)
        return (self[f"{kind}.conditions"] + position).flatten(2)

    def tokens(self, kind: str) -> Tensor:
        """The tokens [L, rows, d], the unconditional rows last."""
        return self[f"{kind}.heads"].flatten(2)

    def as_theirs(self, latents: Tensor) -> Tensor:
        """SphereAR's authors decode cells [B, h * w, channels]."""
        return latents if self.model.config.binary else latents.flatten(2).transpose(1, 2)


def named(golden: CausalGolden, monkeypatch) -> None:
    """Gives a golden file's sizes a name, for the duration of a test."""
    spec = CausalSpec(golden.model.config, SamplingDefaults(cfg=3.0, num_sampling_steps=STEPS))
    monkeypatch.setitem(CAUSALS, "golden", spec)
    monkeypatch.setitem(AUTOENCODERS, "golden", golden.vae.config)
    _shapes.cache_clear()
