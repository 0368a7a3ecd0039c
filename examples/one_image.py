"""One image of one class: python examples/one_image.py

Writes seven.png, by the embedded model of coloured digits. Any folder of official files goes in its place.
"""

import cspd
from cspd.plots import to_pil

engine = cspd.load("digits32", max_batch=1)
output = engine.generate([cspd.Request(label=7, seed=3, cfg=3.0)])[0]

to_pil(output.image).resize((256, 256)).save("seven.png")
print(output.request)
print(f"guarantee: {output.stats.guarantee}; {output.stats.head_calls_per_token:.1f} head calls a token")
