"""A head sampler of your own: guidance in the noisiest steps only, after arXiv 2404.07724.

cspd sample --plugin examples/own_denoiser.py --method early-guidance --guided-share 0.3
"""

from typing import Annotated

from cspd.heads import option, sampler

SHARE = option("fraction of the steps with guidance, the noisiest first", high=1)


@sampler("early-guidance")
def early_guidance(chain, guided_share: Annotated[float, SHARE] = 0.5):
    """Guidance in the noisiest steps only."""
    calls = [(step, step.index < round(guided_share * len(chain))) for step in chain.steps]
    chain.expect(calls)  # announced, so that all that does not depend on x is computed once
    x = chain.start()
    for step, is_guided in calls:
        x = chain.move(x, step, chain.evaluate(x, step, is_guided))
    return x
