"""Prints how many images a second one CPU core writes, reads and decodes: the numbers of docs/many.md.

Times are of the process, not of the clock, so that other programs do not matter.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

import numpy as np
import torch
from webdataset import TarWriter

from cspd.checkpoints import checkpoint_files
from cspd.evaluation.run import SIZE
from cspd.files import read_item, write_bytes, write_item
from cspd.pixels import png_of, to_pil
from mar.checkpoint import load_vae

SECONDS = 2.0  # of each measurement
GRAIN = 4.0  # standard deviation of the noise of the large images, of 255: emojis alone are too smooth


def rate(work: Callable[[], object], images: int) -> float:
    """Images a second of `work`, which handles this many images."""
    work()
    start = process_time()
    calls = 0
    while process_time() < start + SECONDS:
        work()
        calls += 1
    return calls * images / (process_time() - start)


def images_of(side: int) -> torch.Tensor:
    """uint8 [SIZE, 3, side, side]: digits, emojis, or emojis enlarged, with grain."""
    name = "digits32" if side == 32 else "emoji64"
    with np.load(checkpoint_files(name)["target"].parent / "reference.npz") as file:
        images = torch.from_numpy(file["arr_0"][:SIZE]).permute(0, 3, 1, 2)
    if side <= 64:
        return images
    large = torch.nn.functional.interpolate(images.float(), (side, side), mode="bicubic")
    noise = torch.randn(large.shape, generator=torch.Generator().manual_seed(0))
    return (large + GRAIN * noise).clamp(0, 255).round().byte()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print(f"{'images a second':<16} {'PNG':>8} {'shard':>8} {'tar':>8} {'digest':>8}   bytes: PNG, pixels")
    with tempfile.TemporaryDirectory() as folder:
        for side in (32, 64, 256):
            images = images_of(side)
            pixels = images.permute(0, 2, 3, 1).contiguous().numpy()
            pngs = [png_of(to_pil(image)) for image in images]
            shard, tar = Path(folder) / "0.npz", Path(folder) / "0.tar"

            def write_tar(tar=tar, pngs=pngs):
                with tar.open("wb") as file, TarWriter(file) as writer:
                    for index, png in enumerate(pngs):
                        writer.write({"__key__": str(index), "png": png, "json": {"index": index}})

            rates = [
                rate(lambda images=images: [png_of(to_pil(image)) for image in images], SIZE),
                rate(lambda shard=shard, pixels=pixels: write_item(shard, {"images": pixels}, {}), SIZE),
                rate(write_tar, SIZE),
                rate(lambda shard=shard: read_item(shard, {}, {}), SIZE),
            ]
            sizes = f"{sum(map(len, pngs)) / SIZE:,.0f}, {side * side * 3:,}"
            print(f"{side}x{side}".ljust(16), *(f"{each:>8,.0f}" for each in rates), f"  {sizes}")
        content = b"x" * 1000
        names = [Path(folder) / f"{index}.png" for index in range(1000)]
        files = rate(lambda: [write_bytes(name, content) for name in names], len(names))
        print(f"files of 1,000 bytes: {files:,.0f} a second")

    vae = load_vae(checkpoint_files("digits32")["vae"])
    latents = torch.randn(SIZE, vae.post_quant_conv.in_channels, 8, 8)
    with torch.inference_mode():
        print(f"decoded by the autoencoder of digits32: {rate(lambda: vae.decode(latents), SIZE):,.0f} a second")


if __name__ == "__main__":
    main()
