"""Every method of the registry with quick settings, to be traced on the stand-in of tests/standin.py."""

from __future__ import annotations

import standin
from causals import small_sphere
from toys import SMALL, toy_mar, toy_models

import cspd.checkpoints  # noqa: F401  imports every family, which registers its methods
from cspd import CausalModels, Engine, MARModels, Output, Request, VQModels
from cspd.method import METHODS, Method, find

QUICK = {  # values of options by family, then of methods that take no such values
    "MAR": SMALL | {"num_iter": 2, "num_sampling_steps": 3},
    "VQ": {"window": 3, "gamma": 2},
    "causal": {"num_sampling_steps": 4, "head_calls": 4, "window": 2, "upper": 4, "lower": 3},
    "MAR gtr": {"num_iter": 4},
    "MAR budget": {"budget": 0.0},
    "VQ speculative": {"draft": "jacobi"},
    "VQ sjd-pac": {"pd_k": 2, "pd_d": 2, "window": 5},
}
COMMON = {"MAR": ["num_iter", "num_sampling_steps"], "VQ": [], "causal": ["num_sampling_steps"]}
NAMES = [f"{method.family} {method.name}" for method in METHODS]


def requests_of(name: str, num: int, **subject: object) -> list[Request]:
    """Quick requests of a method, such as "MAR ar", with guidance; `subject`: a label or a prompt."""
    family, short = name.split()
    method: Method = find(short, family)
    settings = {"family": family, "method": short, "cfg": 2.0, **QUICK.get(name, {})}
    for option, value in QUICK[family].items():
        if option in COMMON[family] or method.option(option, Request(**settings)):
            settings.setdefault(option, value)
    return [Request(seed=seed, **subject, **settings) for seed in range(num)]


def models_of(name: str) -> MARModels | VQModels | CausalModels:
    if name.startswith("causal"):
        return CausalModels(*small_sphere())
    if name.startswith("VQ"):
        return VQModels(**toy_models(codes=11))
    return MARModels(toy_mar(), toy_mar(2))


def traced(
    models: MARModels | VQModels | CausalModels, requests: list[Request], **settings: object
) -> tuple[list[Output], int]:
    """Outputs on the stand-in, and the number of calls of what torch.compile returned."""
    with standin.cuda() as gpu:
        engine = Engine(models, max_batch=2, device=standin.DEVICE, graphs=False, **settings)
        outputs = engine.generate(requests)  # raises FloatingPointError if one is not finite
    return outputs, gpu.compiled
