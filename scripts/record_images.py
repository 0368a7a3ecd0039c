"""Renews the images of a CPU that `cspd gpu-check` compares with: python scripts/record_images.py"""

from __future__ import annotations

import argparse
import warnings

import torch
from safetensors.torch import save_file

from cspd.gpu_check.models import CHECKED
from cspd.gpu_check.right import CPU, RECORD, generated


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")  # about settings that are unusual, which these are
    images = {}
    for family, name in CHECKED:
        for kind, tensor in generated(family, name, CPU).items():
            images[f"{family} {name} {kind}"] = tensor.to(torch.float16 if tensor.is_floating_point() else torch.int16)
    save_file(images, RECORD)
    print(f"{RECORD}: {len(CHECKED)} methods, {RECORD.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
