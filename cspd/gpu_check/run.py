"""Runs the cases of a GPU check within the minutes it has, keeps what they found in a file, and prints it."""

from __future__ import annotations

import gc
import json
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from tabulate import tabulate
from torch import Tensor
from tqdm import tqdm

from cspd.discrete.gpt import GPTConfig, VQConfig
from cspd.discrete.registry import GPTS
from cspd.files import NUMBER, misfit, read_json, write_json
from cspd.method import PUBLISHED
from cspd.runs import differences
from mar.checkpoint import MARS
from mar.model import MAR, MARConfig

# Golden tensors, made by MAR's and LlamaGen's own code: files beside the tests, where a checkout has them.

GOLDEN_FOLDER = Path(__file__).parent.parent.parent / "tests" / "golden"
SAMPLE_SETTINGS = {  # settings of the samples in MAR's file
    "iter4": dict(num_iter=4, cfg=1.0),
    "iterL": dict(num_iter=64, cfg=1.0),
    "iterL_cfg2": dict(num_iter=64, cfg=2.0, cfg_schedule="linear"),
    "iter4_cfg3_linear": dict(num_iter=4, cfg=3.0, cfg_schedule="linear"),
    "iter4_cfg3_constant_t095": dict(num_iter=4, cfg=3.0, cfg_schedule="constant", temperature=0.95),
}


class Golden(dict):
    """Tensors of a golden file by name; `config` and `weights` of its model."""

    def __init__(self, name: str) -> None:
        with safe_open(GOLDEN_FOLDER / name, "pt") as file:
            super().__init__({key: file.get_tensor(key) for key in file.keys()})
            self.config = json.loads(file.metadata()["config"])
        self.weights = {key.removeprefix("model."): value for key, value in self.items() if key.startswith("model.")}


class GoldenNoise:
    """The golden file's draws, on a device; a request's seed is its row in the file."""

    def __init__(self, golden: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        names = ("sample.orders", "sample.init_noise", "sample.step_noise")
        self.orders, self.init_noise, self.step_noise = (golden[name].to(device) for name in names)

    def order(self, seed: Tensor, length: int) -> Tensor:
        return self.orders[seed].flip(1)  # the file's orders are consumed from their end

    def initial(self, seed: Tensor, position: Tensor, channels: int, index: int) -> Tensor:
        return self.init_noise[seed, position]

    def steps(self, seed: Tensor, position: Tensor, step: Tensor, channels: int, index: int) -> Tensor:
        return self.step_noise[seed, position][:, step].transpose(0, 1)


def golden_mar(golden: Golden) -> MAR:
    """The small MAR of its golden file."""
    c = golden.config
    config = MARConfig(
        img_size=c["img"],
        vae_stride=c["stride"],
        patch_size=c["patch"],
        vae_embed_dim=c["C"],
        class_num=c["cls"],
        embed_dim=c["D"],
        depth=c["L"],
        num_heads=c["H"],
        buffer_size=c["buf"],
        diffloss_w=c["w"],
        diffloss_d=c["d"],
    )
    model = MAR(config)
    model.load_state_dict(golden.weights)
    return model.eval().requires_grad_(False)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest deviation over largest magnitude."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()


# How much is checked: the sizes of everything, of a real run and of one that is over in seconds.

Cases = dict[str, Callable[[], dict[str, Any]]]  # of a part: what is checked or timed, by name


class Setting(NamedTuple):
    """Where MAR is timed: a size of `Scale.mars`, images at once, K, precision, and a way to run of `MODES`."""

    size: str
    batch: int
    num_iter: int
    precision: str
    mode: str


MODES = {  # how an engine runs its rounds
    "eager": {"compiled": False, "graphs": False},
    "compiled": {"compiled": True, "graphs": False},
    "graphs": {"compiled": False, "graphs": True},
}


@dataclass(frozen=True)
class Scale:
    """The sizes of everything.

    Attributes:
        is_tiny: models are small ones with random weights, also where the bundled ones are checked otherwise.
        matmul: side of the matrices. copy_bytes: of the buffer that is copied. launches: kernels that are timed.
        mars, gpts: the models that are timed, with random weights; mar_draft, gpt_draft: smaller ones that draft.
        mar_settings: where MAR is timed. windows: W of `speculative`. head_calls: N of `calibrated`. gamma: of `cspd`.
        gpt_batches: codes are timed for so many images at once.
        steps: T, denoising steps. warm_ups, rounds: before a round is timed, and timed.
        golden: which samples are compared with golden ones. same_seeds: settings of images that two devices make.
        images, samples: of two-sample tests, and draws of the coupling.
        tokenizer: of codes, where a small model is taken.
    """

    is_tiny: bool
    matmul: int
    copy_bytes: int
    launches: int
    mars: dict[str, MARConfig]
    mar_draft: MARConfig
    gpts: dict[str, GPTConfig]
    gpt_draft: GPTConfig
    mar_settings: tuple[Setting, ...]
    windows: tuple[int, ...]
    head_calls: int
    gamma: int
    gpt_batches: tuple[int, ...]
    steps: int
    warm_ups: int
    rounds: int
    golden: tuple[str, ...]
    same_seeds: dict[str, int]
    images: int
    samples: int
    tokenizer: VQConfig


@dataclass(frozen=True)
class Settings:
    """What a part is told: the device, the sizes, and a folder for what is fitted to random weights."""

    device: torch.device
    scale: Scale
    cache: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def one_at_a_time(base: Setting, **others: tuple) -> tuple[Setting, ...]:
    """A setting, and those that differ from it in one factor."""
    changed = [base._replace(**{name: value}) for name, values in others.items() for value in values]
    return (base, *changed)


_B8 = Setting("B", 8, 64, "bf16", "graphs")
FULL = Scale(
    is_tiny=False,
    matmul=8192,
    copy_bytes=2**30,
    launches=2000,
    mars={size: MARS[f"mar_{name}"].config for size, name in (("B", "base"), ("L", "large"), ("H", "huge"))},
    mar_draft=replace(MARS["mar_base"].config, embed_dim=384, depth=6, num_heads=6, diffloss_w=512, diffloss_d=3),
    gpts={size: GPTS[f"llamagen_{size.lower()}"].config for size in ("B", "XL", "3B")},
    gpt_draft=replace(GPTS["llamagen_b"].config, n_layer=3),
    mar_settings=(
        *one_at_a_time(
            _B8,
            batch=(1, 32, 128, 256),
            size=("L", "H"),
            mode=("eager", "compiled"),
            precision=("tf32", "fp32"),
            num_iter=(256, 16),
        ),
        _B8._replace(size="H", batch=1),
        _B8._replace(size="H", batch=64),
    ),
    windows=(12, 24),
    head_calls=10,
    gamma=8,
    gpt_batches=(1, 8, 64),
    steps=100,
    warm_ups=2,
    rounds=5,
    golden=tuple(SAMPLE_SETTINGS),
    same_seeds={"images": 4, "num_iter": 8, "num_sampling_steps": 25},
    images=500,
    samples=1_000_000,
    tokenizer=VQConfig(),
)

_SMALL_MAR = MARConfig(
    img_size=32,
    vae_stride=4,
    embed_dim=32,
    depth=1,
    num_heads=2,
    class_num=10,
    buffer_size=4,
    diffloss_w=32,
    diffloss_d=1,
)
_SMALL_GPT = GPTConfig(dim=32, n_layer=2, n_head=2, vocab_size=64, block_size=64, num_classes=10, multiple_of=32)
_SMALL = Setting("B", 2, 8, "bf16", "graphs")
TINY = Scale(
    is_tiny=True,
    matmul=256,
    copy_bytes=2**22,
    launches=20,
    mars={"B": _SMALL_MAR},
    mar_draft=_SMALL_MAR,
    gpts={"B": _SMALL_GPT},
    gpt_draft=replace(_SMALL_GPT, n_layer=1),
    mar_settings=one_at_a_time(_SMALL, batch=(1,), precision=("fp32",), num_iter=(4,)),
    windows=(4,),
    head_calls=5,
    gamma=4,
    gpt_batches=(1, 2),
    steps=25,
    warm_ups=1,
    rounds=1,
    golden=("iter4_cfg3_linear",),
    same_seeds={"images": 2, "num_iter": 8, "num_sampling_steps": 25},
    images=8,
    samples=4_000,
    tokenizer=VQConfig(
        ch=32, ch_mult=(1, 1), z_channels=32, codebook_size=64, codebook_dim=2, num_res_blocks=1, attention=False
    ),
)


# The parts of a check, in their order: what each may take of the time, and its cases.


class Part(NamedTuple):
    """A name, a share of the time, and what makes the cases: functions without arguments, by name.

    A case returns what it found. `passed` is False where something is wrong, `skipped` says why nothing was done, and
    an error is kept with its traceback.
    """

    name: str
    share: float
    cases: Callable[[Settings], Cases]


# Runs the parts one after the other, each within its share of the time, and keeps what they found in a file.

SCHEMA = "cspd.gpu-check/1"
TOP = {"name": str, "count": NUMBER, "microseconds": NUMBER}
RESULT = {
    "error?": str,
    "skipped?": str,
    "gb_per_s?": NUMBER,
    "tflop_per_s?": NUMBER,
    "windows?": {str: {}},
    "top?": [TOP],
}
TIMED = {name: NUMBER for name in ("ms", "flops", "bytes", "peak_bytes", "batch")}
TIMED |= {"num_iter?": int, **dict.fromkeys(("size", "precision", "method"), str)}
SHAPE = {"schema": str, "scale": str, "device": str, "parts": {str: {str: RESULT}}}
LEFT_OUT = "left_out"
NO_GRAPH = "no CUDA graph of"  # what `cspd.graphs` warns of
NO_TIME = "its part's share of the time was over: the same command goes on from here"
REMEDY = "give another --out, or --overwrite"


def run_cases(
    out: Path,
    device: torch.device,
    parts: Sequence[Part],
    *,
    tiny: bool = False,
    minutes: float = 9.0,
    overwrite: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Checks a device and returns the report, which is in the file `out` from the first case on.

    What the file has already is not done again, unless it was left out or failed with an error.

    Args:
        parts: what is checked. tiny: small models, to be done in seconds anywhere. minutes: for all parts.
        overwrite: begin anew.

    Raises:
        ValueError: the file is no report, or one of another device or size.
    """
    about = {"schema": SCHEMA, "scale": "tiny" if tiny else "full", "device": _name(device)}
    report = {**about, "parts": {}}
    if out.exists() and not overwrite:
        report = read_report(out, REMEDY)
        change = differences({name: report[name] for name in about}, about)
        if change:
            raise ValueError(f"{out} is of another check ({', '.join(change)}): {REMEDY}")
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="cspd-gpu-check-") as cache, _bar(parts, progress) as bar:
        settings = Settings(device, TINY if tiny else FULL, Path(cache))
        for i, part in enumerate(parts):
            now = time.monotonic()
            share = part.share / sum(each.share for each in parts[i:])  # of what the parts before it have left
            cases = report["parts"].setdefault(part.name, {})
            for done in _cases(part, settings, cases, until=now + share * (end - now)):
                bar.n = i + done
                bar.set_description(part.name)
                write_json(out, report)
    return report


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _bar(parts: Sequence[Part], progress: bool) -> tqdm:
    form = "{desc}{percentage:3.0f}%|{bar}| [{elapsed}<{remaining}]"
    return tqdm(total=len(parts), bar_format=form, disable=not progress)


def _cases(part: Part, settings: Settings, found: dict[str, dict], until: float) -> Iterator[float]:
    """Does what is missing of a part; yields after each case the share of them that is done."""
    cases = part.cases(settings)
    for i, (name, case) in enumerate(cases.items(), 1):
        if is_missing(found.get(name)):
            is_late = time.monotonic() >= until
            found[name] = {LEFT_OUT: NO_TIME} if is_late else _tried(case)
        yield i / len(cases)


def is_missing(result: dict | None) -> bool:
    """Whether a case is still to be done: never tried, left out, or ended by an error."""
    return result is None or LEFT_OUT in result or "error" in result


def _tried(case: Callable[[], dict]) -> dict[str, Any]:
    """What a case found, or its error, its warnings, and the seconds it took; the device's memory is free again.

    It failed where rounds should have been graphs and could not be captured.
    """
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as told:
        try:
            found = case()
        except torch.OutOfMemoryError as error:
            found = {"skipped": f"too little memory: {error}".partition("\n")[0]}
        except Exception:  # whatever it was: the others go on
            found = {"error": traceback.format_exc()}
    found["seconds"] = time.monotonic() - start
    found["warnings"] = list(dict.fromkeys(str(warning.message) for warning in told))
    if any(NO_GRAPH in text for text in found["warnings"]):
        found["passed"] = False
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
    return json.loads(json.dumps(found), parse_constant=str)  # numbers that are not finite become words


def read_report(path: Path, remedy: str = "give another file") -> dict[str, Any]:
    """A report that `run_cases` wrote. Raises OSError; ValueError, which ends with the remedy, where it is none."""
    try:
        report = read_json(path)
        place = misfit(report, SHAPE) or _untimely(report["parts"])
    except ValueError as error:
        raise ValueError(f"{path} is no report of gpu-check ({error}): {remedy}") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read ({error.strerror}): {remedy}") from None
    if not place and report["schema"] != SCHEMA:
        place = "schema"
    if place:
        none = f"{path} is no report of this version of gpu-check: {place} is none of its"
        raise ValueError(f"{none}; {remedy}")
    return report


def _untimely(parts: dict[str, dict]) -> str | None:
    """Where a case that was timed has not what its times are told by; None where all have."""
    timed = {
        f"parts.{part}.{name}": result
        for part, cases in parts.items()
        for name, result in cases.items()
        if "ms" in result
    }
    return next(filter(None, (misfit(result, TIMED, place) for place, result in timed.items())), None)


def failures(report: dict[str, Any]) -> list[str]:
    """What failed: "part, case"."""
    return [
        f"{part}, {name}"
        for part, cases in report["parts"].items()
        for name, result in cases.items()
        if "error" in result or result.get("passed") is False
    ]


BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


# A report as tables: what was checked, how fast it was, and how near to what the device can do.

TIMES = {"MAR times": PUBLISHED, "VQ times": "ar"}  # what the others are compared with
SAME = ("size", "batch", "num_iter", "precision")  # of two times that are compared
WIDEST = 100  # characters of what a case found


def format_check(report: dict[str, Any]) -> str:
    """The report as text."""
    found = {part: {n: r for n, r in cases.items() if "ms" not in r} for part, cases in report["parts"].items()}
    lines = [f"{report['device']}, {report['scale']} size", ""]
    rows = [
        [part, name, _verdict(result), _told(result)] for part, cases in found.items() for name, result in cases.items()
    ]
    lines += [tabulate(rows, ["part", "case", "", "found"], disable_numparse=True), ""]
    for part in TIMES:
        rows = list(_times(report, part))
        if rows:
            titles = [f"{part}, of a few rounds", "ms an image", f"x {TIMES[part]}", "x limit", "GiB"]
            lines += [tabulate(rows, titles, floatfmt=("", ".2f", ".2f", ".1f", ".1f")), ""]
    rows = list(_windows(report["parts"].get("windows", {})))
    if rows:
        lines += [tabulate(rows, ["W of speculative", *(f"batch {batch}" for batch in BATCHES)]), ""]
    lines += [_top(report["parts"].get("top kernels", {}))]
    left = sum(LEFT_OUT in result for cases in report["parts"].values() for result in cases.values())
    if left:
        lines.append(f"{left} cases were left out, since time was over: run the same command again")
    failed = failures(report)
    lines.append(f"{len(failed)} failed: {'; '.join(failed)}" if failed else "nothing failed")
    return "\n".join(line for line in lines)


def _verdict(result: dict[str, Any]) -> str:
    if "error" in result:
        return "ERROR"
    if LEFT_OUT in result:
        return "left out"
    if "skipped" in result:
        return "skipped"
    if "passed" not in result:
        return ""
    return "FAILED" if result["passed"] is False else "passed"


def _told(result: dict[str, Any]) -> str:
    """What a case found, in a line: of an error the last one."""
    if "error" in result:
        return result["error"].strip().rpartition("\n")[2][:WIDEST]
    if "skipped" in result:
        return result["skipped"]
    silent = ("passed", "seconds", "top", "windows", "costs", LEFT_OUT)
    result = {name: value for name, value in result.items() if value != []}
    parts = [f"{name} {_number(value)}" for name, value in result.items() if name not in silent]
    return ", ".join(parts)[: 2 * WIDEST]


def _number(value: object) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_number(each)}" for key, each in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _times(report: dict[str, Any], part: str) -> Iterator[list]:
    """Rows of a part that times: milliseconds, their ratio to the baseline's, and to the least that is possible."""
    cases = report["parts"].get(part, {})
    base = {_same(r): r["ms"] for r in cases.values() if r.get("method") == TIMES[part] and "ms" in r}
    for name, result in cases.items():
        if "ms" in result:
            least = _least_ms(report["parts"].get("machine", {}), result)
            plain = base.get(_same(result))
            speed = plain and result["ms"] and plain / result["ms"]
            yield [name, result["ms"], speed, least and result["ms"] / least, result["peak_bytes"] / 2**30]


def _same(result: dict[str, Any]) -> tuple:
    return tuple(result.get(name) for name in SAME)


def _least_ms(machine: dict[str, dict], result: dict[str, Any]) -> float | None:
    """Milliseconds of an image if the device did nothing else; None where it was not measured."""
    bandwidth = machine.get("copy", {}).get("gb_per_s")
    peak = machine.get(f"matmul {result['precision']}", {}).get("tflop_per_s")
    if not bandwidth or not peak:
        return None
    return 1000 * max(result["flops"] / (peak * 1e12), result["bytes"] / (bandwidth * 1e9))


def _windows(cases: dict[str, dict]) -> Iterator[list]:
    """Rows of the windows that were chosen, by batch."""
    for size, result in cases.items():
        for num_iter, chosen in result.get("windows", {}).items():
            yield [f"{size}, {num_iter}", *(chosen.get(str(batch)) for batch in BATCHES)]


def _top(cases: dict[str, dict]) -> str:
    """The kernels that take the most time."""
    lines = []
    for name, result in cases.items():
        rows = [[k["name"][:WIDEST], k["count"], k["microseconds"]] for k in result.get("top", [])]
        lines += [tabulate(rows, [name, "runs", "us"], floatfmt=".0f"), ""] if rows else []
    return "\n".join(lines)
