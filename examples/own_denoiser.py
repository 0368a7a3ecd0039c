"""A head sampler of your own: guidance in the noisiest steps only, after arXiv 2404.07724.

cspd sample --plugin examples/own_denoiser.py --method early-guidance --guided-share 0.3
"""

from typing import Annotated

from cspd.heads import option, sampler

SHARE = option("fraction of the steps with guidance, the noisiest first", high=1)


@sampler("early-guidance")
def early_guidance(chain, guided_share: Annotated[float, SHARE] = 0.5):
    """Guidance in the noisiest steps only."""
    x = chain.start()
    for step in chain.steps:
        out = chain.evaluate(x, step, guided=step.index < round(guided_share * len(chain)))
        x = chain.move(x, step, out)
    return x
