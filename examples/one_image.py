"""One image of one class: python examples/one_image.py

Writes seven.png, by the bundled model of coloured digits. Any folder of official files goes in its place.
"""

import cspd

with cspd.load("digits32", max_batch=1) as engine:
    (output,) = engine.sample("seven", seed=3, cfg=3.0)

output.pil().resize((256, 256)).save("seven.png")
print(output)
print(f"guarantee: {output.stats.guarantee}; {output.stats.head_calls_per_token:.1f} head calls a token")
