"""The published methods of VQ models: pairs of a draft and a rule, each with the settings of its paper."""

from __future__ import annotations

from cspd.discrete.drafts import drafting, run_plain_round
from cspd.discrete.jacobi import jacobi
from cspd.discrete.rules import MIXED
from cspd.method import Method

AR = Method(
    name="ar",
    family="VQ",
    guarantee="exact",
    summary="baseline sampling: one token per forward pass",
    papers={"2406.06525": "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation"},
    run_round=run_plain_round,
    mixed=lambda request: MIXED,
)
SD = drafting(
    "sd",
    "speculative sampling: a smaller GPT drafts a chain of tokens",
    {"2211.17192": "Fast Inference from Transformers via Speculative Decoding"},
    draft="chain",
    gamma=5,
)
EAGLE = drafting(
    "eagle",
    "EAGLE-1: a drafter on the target's features drafts a fixed tree",
    {"2401.15077": "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"},
    draft="eagle-static",
    gamma=5,
)
EAGLE2 = drafting(
    "eagle2",
    "EAGLE-2: the drafter's confidence shapes the tree; same images as ar",
    {"2406.16858": "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees"},
    draft="eagle-dynamic",
    gamma=6,
    coupling="same-image",
)
COOL_SD_PAPER = {
    "2601.09212": "Annealed Relaxation of Speculative Decoding for Faster Autoregressive Image Generation (COOL-SD)"
}
UNIFORM_RSD = drafting(
    "uniform-rsd",
    "relaxes acceptance by a constant, on EAGLE-1's tree",
    COOL_SD_PAPER,
    draft="eagle-static",
    gamma=5,
    rule="uniform-rsd",
)
COOL_SD = drafting(
    "cool-sd",
    "relaxes acceptance by a schedule that decays with depth, on EAGLE-1's tree",
    COOL_SD_PAPER,
    draft="eagle-static",
    gamma=5,
    rule="cool-sd",
)
LANTERN = drafting(
    "lantern",
    "pools acceptance over near codebook entries, on EAGLE-2's tree",
    {"2410.03355": "LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding"},
    draft="eagle-dynamic",
    gamma=6,
    rule="lantern",
    k=100,
    optimal=False,
)
LANTERN_PLUS = drafting(
    "lantern++",
    "LANTERN with a relative limit, on EAGLE-1's tree",
    {
        "2502.06352": "LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual"
        " Auto-regressive Models"
    },
    draft="eagle-static",
    gamma=5,
    rule="lantern++",
    lam=1.0,
    k=10,
    optimal=False,
)
SJD = jacobi(
    "sjd",
    "Jacobi decoding: the target drafts a window for itself; same images as ar",
    {
        "2410.01699": "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi"
        " Decoding"
    },
    coupling="same-image",
)
MC_SJD = jacobi(
    "mc-sjd",
    "Jacobi decoding that keeps drafted tokens from round to round if it can",
    {
        "2510.24211": "MC-SJD: Maximal Coupling Speculative Jacobi Decoding for Autoregressive Visual Generation"
        " Acceleration"
    },
    continuation=True,
)
SJD_PAC = jacobi(
    "sjd-pac",
    "Jacobi decoding with proactive drafting and adaptive continuation",
    {
        "2603.18599": "SJD-PAC: Accelerating Speculative Jacobi Decoding via Proactive Drafting and Adaptive"
        " Continuation"
    },
    pd_k=4,
    pd_d=3,
    continuation=True,
)
GSD = jacobi(
    "gsd",
    "Jacobi decoding that accepts by groups of about equally likely tokens",
    {"2508.07747": "Grouped Speculative Decoding for Autoregressive Image Generation"},
    rule="gsd",
    optimal=False,
)
