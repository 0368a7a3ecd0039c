"""A draft without a model: the tokens after the last earlier occurrence of the last token (n-gram, prompt lookup).

They are chosen, not sampled, so the rule verifies them as point masses: exact.
cspd sample --plugin examples/own_draft.py --checkpoint digits32_vq --method ngram
"""

import torch

import cspd
from cspd.discrete import trees
from cspd.discrete.drafts import Drafted, draft, drafting


@draft("ngram")
def propose(runner, batch):
    """The gamma tokens after the last earlier occurrence of the last committed token, or -1 if there is none."""
    gamma = batch.request.gamma
    last, _ = runner.last(batch, 1)  # [B, 1]
    tokens = runner.tokens[batch.slot]
    committed = batch.num_committed.unsqueeze(1)
    index = torch.arange(tokens.shape[1], device=runner.device)

    earlier = (tokens == last) & (index < committed - 1)
    found = torch.where(earlier, index, -1).amax(1, keepdim=True)
    source = found + 1 + index[:gamma]
    drafted = torch.where((found >= 0) & (source < committed), tokens.gather(1, source), -1)
    return Drafted(trees.chain_shape(gamma, runner.device), torch.cat([last, drafted], 1), None)


cspd.register(drafting("ngram", "a chain of the tokens that followed before", {}, draft="ngram", gamma=4))
