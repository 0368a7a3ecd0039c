"""Speed and quality against the number of iterations: python examples/sweep.py

Makes the same 20 seeds at several K with `ar`. Prints the speed and the share that the classifier recognises.
"""

import time

import torch

import cspd
from cspd.evaluation.metrics import accuracy, load_classifier

engine, classifier = cspd.load("digits32", max_batch=10), load_classifier("digits")
for num_iter in (4, 8, 16, 32, 64):
    requests = [cspd.Request(i % 10, seed=i, method="ar", num_iter=num_iter, cfg=3.0) for i in range(20)]
    start = time.perf_counter()
    outputs = engine.generate(requests, progress=True)
    seconds = time.perf_counter() - start

    images = torch.stack([output.image for output in outputs])
    labels = torch.tensor([request.label for request in requests])
    recognised = accuracy(classifier, images, labels)
    print(f"K = {num_iter:>2}: {len(outputs) / seconds:5.2f} images/s, {recognised:.0%} recognised")
