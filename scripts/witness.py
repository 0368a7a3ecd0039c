"""Digests of what every method makes, so that a change of the code can be shown to change no image.

    python scripts/witness.py before.json     # on the code as it was: writes the digests
    python scripts/witness.py before.json     # on the changed code: compares, and exits with 1 if one differs

The bundled models are sampled with every method, order, backbone, denoiser, draft and rule, in float32 and bfloat16,
with one and five images at once, with and without guidance, from classes, prompts and parts of images. Digests hold on
one machine only: processors round differently. Only public names are used, so that the file outlives any re-cut.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from cspd import Engine, Output, Request, load

SETTINGS = {"num_iter": 4, "num_sampling_steps": 12}
WINDOW = {"window": 4}  # given, since a window that is chosen by timings is another one on another day
MAR_METHODS = {
    "ar": {},
    "speculative": WINDOW,
    "calibrated": {"head_calls": 6},
    "disa": {"upper": 8, "lower": 4},
    "ddim": {"head_calls": 5},
    "dpm-solver++": {"head_calls": 5},
    "gtr": {"upper": 8, "lower": 4},
    "lazymar": {},
    "mar-draft": {},
}
# the named methods whose options differ from those of a method above
MAR_VARIANTS = {
    "speculative": [{"draft": "frozen"}],
    "calibrated": [{"audit": 0.5}, {"null_every": 1}],
    "ddim": [{"grid": "planned"}],
    "mar-draft": [
        {"verify": "sequential"},
        {"sigma": "published"},
        {"align": False},
        {"chains": "speculative", **WINDOW},
    ],
}
DENOISERS = {
    "ancestral": {},
    "annealed": {"upper": 8, "lower": 4},
    "cached": {},
    "calibrated": {"head_calls": 6},
    "frequency-weighted": {"upper": 8, "lower": 4},
    "ddim": {"head_calls": 5},
    "dpm-solver++": {"head_calls": 5},
    "speculative": WINDOW,
}
CAUSAL_METHODS = {
    "ar": {},
    "speculative": WINDOW,
    "calibrated": {"head_calls": 6},
    "euler": {"head_calls": 5},
    "heun": {"head_calls": 5},
}
VQ_METHODS = {
    "ar": {},
    "speculative": {"draft": "jacobi", "window": 8},
    "sd": {},
    "eagle": {},
    "eagle2": {},
    "uniform-rsd": {},
    "cool-sd": {},
    "lantern": {},
    "lantern++": {},
    "sjd": {"window": 16},
    "mc-sjd": {"window": 16},
    "sjd-pac": {"window": 16},
    "gsd": {"window": 16},
}
DRAFTS = {"chain": "sd", "eagle-static": "eagle", "eagle-dynamic": "eagle2", "jacobi": "sjd"}
RULES = ("exact", "uniform-rsd", "cool-sd", "lantern", "lantern++", "gsd")
CLASSES = [{"label": label} for label in (3, 1, 4, 5, 9)]
TEXTS = [{"prompt": text} for text in ("a red heart", "man: red hair", "blue circle", "thumbs up", "grinning face")]
MODELS = {  # the family of each, five requests, and a guidance scale
    "digits32": ("MAR", CLASSES, 3.0),
    "digits32_vq": ("VQ", CLASSES, 3.0),
    "emoji64_sphere": ("causal", CLASSES, 4.0),
    "emoji64_text": ("VQ", TEXTS, 4.5),
}
LEFT = 0.125  # of an image's tokens that a part of one leaves to be generated


def left_of(output: Output, family: str) -> float | torch.Tensor:
    """What is left to be generated of an image: some tokens, or the last ones of a model in raster order."""
    if family == "MAR":
        return LEFT
    length = len(output.tokens)
    return torch.arange(length) >= length - int(LEFT * length)


def cases(family: str) -> list[tuple[str, dict]]:
    """A name and settings for every method and combination of a family, baseline sampling first."""
    if family == "causal":
        steps = {"num_sampling_steps": SETTINGS["num_sampling_steps"]}
        return [(name, steps | {"method": name.partition("+")[0], **own}) for name, own in CAUSAL_METHODS.items()]
    if family == "VQ":
        found = [(method, {"method": method, **own}) for method, own in VQ_METHODS.items()]
        for (draft, method), rule in itertools.product(DRAFTS.items(), RULES):
            window = {"window": 16} if draft == "jacobi" else {}
            found.append((f"{draft}+{rule}", {"method": method, "rule": rule, **window}))
        coupled = {"coupling": "same-image", "rule": "exact"}
        return [*found, *((f"{name}+same-image", {"method": name, **coupled}) for name in ("sd", "mc-sjd"))]
    found = []
    for method, own in MAR_METHODS.items():
        found.append((method, SETTINGS | {"method": method, **own}))
        for variant in MAR_VARIANTS.get(method, []):
            found.append((f"{method}+{variant}", SETTINGS | {"method": method, **own, **variant}))
    for order, backbone, denoiser in itertools.product(("random", "checkerboard"), ("full", "cached"), DENOISERS):
        axes = {"order": order, "backbone": backbone, "denoiser": denoiser, **DENOISERS[denoiser]}
        found.append((f"{order}+{backbone}+{denoiser}", SETTINGS | {"method": "gtr", **axes}))
    return found


def digest(output: Output) -> str:
    """Of an output's tokens and image, in hexadecimal."""
    found = hashlib.sha256(output.tokens.contiguous().numpy().tobytes())
    found.update(output.image.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def digests_of(engine: Engine, of: list[dict], parts: list[dict], settings: dict) -> list[str]:
    """The digests of images of classes or prompts, given parts of them; or the error, if the engine refuses."""
    requests = [Request(seed=i, **own, **part, **settings) for i, (own, part) in enumerate(zip(of, parts))]
    try:
        return [digest(output) for output in engine.generate(requests)]
    except ValueError as error:  # a pair that cannot be asked for
        return [type(error).__name__]


def digests(checkpoint: str, family: str, subjects: list[dict], guidance: float) -> Iterator[tuple[str, list[str]]]:
    """A name and the digests of the images of every case, in both precisions and two sizes of batch."""
    for precision, batch in itertools.product(("fp32", "bf16"), (1, 5)):
        engine = load(checkpoint, max_batch=batch, device="cpu", precision=precision)
        of = subjects[:batch]
        plain = cases(family)[0][1]
        whole = engine.generate([Request(seed=i, **subject, **plain) for i, subject in enumerate(of)])
        parts = [{"image": output.tokens, "mask": left_of(output, family)} for output in whole]

        for cfg, (name, settings) in itertools.product((1.0, guidance), cases(family)):
            where = f"{checkpoint} {precision} batch {batch} cfg {cfg:g}: {name}"
            # whole images of VQ models take seconds: a part is enough of combinations, and with guidance
            if family != "VQ" or (name in VQ_METHODS and cfg == 1 and precision == "fp32"):
                yield where, digests_of(engine, of, [{}] * batch, settings | {"cfg": cfg})
            if family == "VQ" or (family == "MAR" and "+" not in name):
                yield f"{where}, of a part", digests_of(engine, of, parts, settings | {"cfg": cfg})


def record(path: Path, checkpoint: str) -> None:
    """Writes the digests of a model to a file."""
    torch.set_num_threads(1)
    found = {}
    for name, own in digests(checkpoint, *MODELS[checkpoint]):
        found[name] = own
        print(name, file=sys.stderr)
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="the digests; compared with if it is there")
    parser.add_argument("--model", choices=MODELS, help="only of this model, in this process")
    args = parser.parse_args()
    if args.model:
        record(args.file, args.model)
        return 0
    with tempfile.TemporaryDirectory() as folder:  # calibrations are fitted by the code that is examined
        environment = os.environ | {"XDG_CACHE_HOME": folder, "PYTHONPATH": os.getcwd()}
        files = {model: Path(folder) / f"{model}.json" for model in MODELS}
        running = [
            subprocess.Popen([sys.executable, __file__, str(file), "--model", model], env=environment)
            for model, file in files.items()
        ]
        if any(process.wait() for process in running):
            return 2
        found = {name: own for file in files.values() for name, own in json.loads(file.read_text()).items()}
    if not args.file.exists():
        args.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {len(found)} digests to {args.file}")
        return 0
    before = json.loads(args.file.read_text())
    changed = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    for name in sorted(changed):
        print(f"{name}: was {before.get(name)}, now {found.get(name)}")
    print(f"{len(changed)} of {len(before)} differ")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
