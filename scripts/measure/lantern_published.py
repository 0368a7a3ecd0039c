"""Measures how LANTERN's released code differs from its paper, on digits32_vq.

    python scripts/measure/lantern_published.py

It compares, for the first drafted token at every position of sampled images, the residual distribution G after a
rejection, and the distribution of the committed token. "drawn" tokens are those of a chain or a static tree, the
"chosen" one is the first of EAGLE-2's tree.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

import cspd
from cspd.discrete.registry import VQDefaults
from cspd.discrete.rules import Lantern, bound, near_codes
from cspd.discrete.trees import verify_siblings

sys.path.append(str(Path(__file__).parents[1] / "train"))
from conditions import inputs_of
from drafted import distributions
from train_eagle import predict

IMAGES = 10
SAMPLING = VQDefaults(cfg=2.0)
SETTINGS = ((0.2, 100), (0.4, 511))  # delta, k
PLACES = 8  # positions at a time


def drafts() -> tuple[cspd.Engine, Tensor, Tensor]:
    """The engine, and P and Q [N, V] at all positions of the images."""
    engine = cspd.load("digits32_vq", max_batch=IMAGES, device="cpu")
    outputs = engine.sample(range(IMAGES), method="ar", cfg=SAMPLING.cfg)
    runner, codes = engine.runner, torch.stack([output.tokens for output in outputs])
    labels = torch.tensor([output.request.label for output in outputs])
    is_null = torch.arange(2 * IMAGES) >= IMAGES
    inputs = inputs_of(runner, range(runner.num_classes), labels.repeat(2), is_null, codes.repeat(2, 1))
    both = predict(runner.target, runner.models["eagle"], inputs, 0.0, torch.Generator())
    predicted, features = (distributions(runner.target, made, SAMPLING).flatten(0, 1) for made in both)
    return engine, features, predicted


def distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1) / 2


def chosen(Q: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest code [N, 1], and the point mass [N, 1, V] that it was drafted from."""
    x = Q.argmax(-1, keepdim=True)
    return x, torch.zeros_like(Q).scatter(-1, x, 1).unsqueeze(1)


def drawn(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Every code [N, V], and the distribution Q [N, V, V] that it was drafted from."""
    codes = torch.arange(Q.shape[-1]).expand(len(Q), -1)
    return codes, Q.unsqueeze(1).expand(-1, codes.shape[1], -1)


def residual(rule: Lantern, P: Tensor, Q: Tensor, f: Tensor, x: Tensor) -> Tensor:
    """G [N, n, V] after the rejection of each of codes x [N, n], from P and f [N, V], and Q [N, n, V]."""
    if x.shape[1] == 1:  # a chosen code
        return verify_siblings(rule, P, None, x, torch.ones(x.shape)).residual.unsqueeze(1)
    P, f = (each.unsqueeze(1).expand_as(Q) for each in (P, f))
    return rule.resample(P, Q, f, x)


@torch.inference_mode()
def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    engine, P_all, Q_all = drafts()
    tokenizer = engine.runner.models["tokenizer"]
    print("delta    k  drafted  TV of G   committed: paper  its bound  released")
    for (delta, k), draft in itertools.product(SETTINGS, (drawn, chosen)):
        near = near_codes(tokenizer, "l2", k + 1)
        paper = Lantern(delta, k=k, optimal=False, near=near)
        code = dataclasses.replace(paper, published=True)
        sums = torch.zeros(5, dtype=torch.float64)
        for P, Q in zip(P_all.split(PLACES), Q_all.split(PLACES)):
            x, q = draft(Q)
            f = paper.accept(P, q[:, 0])
            G, G_code = (residual(rule, P, q, f, x) for rule in (paper, code))
            rejected = q[:, 0].gather(-1, x) * (1 - f.gather(-1, x))
            of_G = (rejected * distance(G, G_code)).sum()
            accepted = q[:, 0] * f
            committed = [accepted + (rejected.unsqueeze(-1) * made).sum(1) for made in (G, G_code)]
            distances = [distance(each, P).sum() for each in committed]
            theorem = bound(P, q[:, 0], f).sum()
            sums += torch.stack([of_G, rejected.sum(), distances[0], theorem, distances[1]]).double()
        of_G, rejected, *rest = sums.tolist()
        means = " ".join(f"{each / len(P_all):10.3f}" for each in rest)
        print(f"{delta:5} {k:4}  {draft.__name__:<7}  {of_G / rejected:7.3f}   {means}")


if __name__ == "__main__":
    main()
