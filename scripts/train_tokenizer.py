"""Trains a VQ tokenizer on coloured digits, or on a folder of images: python scripts/train_tokenizer.py --data FOLDER

Straight-through gradients, as LlamaGen's, without its perceptual and adversarial losses: squared error is enough for
pictures of few details. Codes that no vector of a batch is near to are moved onto vectors of that batch, so that none
stays unused.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pictures import add_data_options, data_of
from torch import Tensor
from training import HELD_OUT_SEED, device_of_process, export, fit

from cspd.vq.registry import TOKENIZERS, create_tokenizer
from cspd.vq.tokenizer import VQModel

COMMITMENT = 0.25
REVIVE_EVERY = 20  # steps
REVIVE_UNTIL = 0.7  # share of the steps
PART = 64  # images that are measured at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_options(parser)
    parser.add_argument("--arch", default="vq_digits32", choices=TOKENIZERS)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--run", type=Path, default=Path("runs/tokenizer"), help="resumes from here if it was cut off")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    names = ("data", "size", "upright", "arch", "steps", "batch", "lr")
    settings = {name: getattr(args, name) for name in names}
    data = data_of(args)
    device = device_of_process()
    torch.manual_seed(0)
    model = create_tokenizer(args.arch).to(device).train()

    @torch.no_grad()
    def revive(vectors: Tensor, used: Tensor, generator: torch.Generator) -> None:
        pool = vectors.flatten(2).transpose(1, 2).flatten(0, 1)
        picked = pool[torch.randint(len(pool), (len(used),), generator=generator).to(device)]
        weight = model.quantize.embedding.weight
        weight.copy_(torch.where(used.unsqueeze(1), weight, picked))

    def loss_fn(number: int) -> tuple[Tensor, dict[str, float]]:
        images = data.draw(args.batch, number, "train")[0].to(device)
        with torch.autocast(device.type, torch.bfloat16):
            vectors = model.project(images)
        vectors = vectors.float()
        codes = model.nearest(vectors)
        used = torch.bincount(codes.flatten(), minlength=model.config.codebook_size) > 0
        if number % REVIVE_EVERY == 0 and number < REVIVE_UNTIL * args.steps:
            revive(vectors, used, torch.Generator().manual_seed(number))
            codes = model.nearest(vectors)
        quantised = model.lookup(codes)
        commit = (quantised.detach() - vectors).square().mean()
        codebook = (quantised - vectors.detach()).square().mean()
        with torch.autocast(device.type, torch.bfloat16):
            straight_through = vectors + (quantised - vectors).detach()
            decoded = model.render(straight_through)
        mse = (decoded.float() - images).square().mean()
        psnr = round(-10 * torch.log10(mse / 4).item(), 2)
        return mse + codebook + COMMITMENT * commit, {"psnr": psnr, "used": int(used.sum())}

    images = data.draw(512, HELD_OUT_SEED, "held-out")[0]

    def show(model: VQModel) -> Tensor:
        shown = images[:32].to(device)
        return torch.cat([shown, model.decode(model.encode(shown))]) / 2 + 0.5

    model, seconds = fit(
        model,
        loss_fn,
        run=args.run,
        settings=settings,
        steps=args.steps,
        lr=args.lr,
        weight_decay=0.0,
        ema_decay=0.0,
        show=show,
    )
    with torch.inference_mode():
        model = model.cpu().half().float()  # as stored
        codes = torch.cat([model.encode(part) for part in images.split(PART)])
        decoded = torch.cat([model.decode(part) for part in codes.split(PART)])
        mse = (decoded.clamp(-1, 1) - images).square().mean()
        psnr = -10 * torch.log10(mse / 4).item()
        share = torch.bincount(codes.flatten(), minlength=model.config.codebook_size) / codes.numel()
        entropy = -(share * share.clamp_min(1e-12).log2()).sum().item()
    print(f"held-out PSNR {psnr:.2f} dB, {int((share > 0).sum())} codes used, {entropy:.2f} bits of entropy per code")
    export(model, args.out, args.arch, seconds, half=lambda name: True)


if __name__ == "__main__":
    main()
