"""A draft without a model: the codes that followed the last time the last code stood there (n-gram, prompt lookup).

They are chosen, not drawn, so the rule judges them as point masses: exact.
cspd sample --plugin examples/own_draft.py --checkpoint digits32_vq --method ngram
"""

import torch

import cspd
from cspd.discrete import trees
from cspd.discrete.drafts import Drafted, draft, drafting


@draft("ngram")
def propose(runner, batch):
    """gamma codes after the last earlier place of the last committed code; none (-1) where there is no such place."""
    gamma = batch.request.gamma
    last, _ = runner.last(batch, 1)  # [B, 1]
    codes = runner.tokens[batch.slot]
    known = batch.num_committed.unsqueeze(1)
    place = torch.arange(codes.shape[1], device=runner.device)

    earlier = (codes == last) & (place < known - 1)
    found = torch.where(earlier, place, -1).amax(1, keepdim=True)
    source = found + 1 + place[:gamma]
    drafted = torch.where((found >= 0) & (source < known), codes.gather(1, source), -1)
    return Drafted(trees.chain_shape(gamma, runner.device), torch.cat([last, drafted], 1), None)


cspd.register(drafting("ngram", "a chain of codes that followed before", {}, draft="ngram", gamma=4))
