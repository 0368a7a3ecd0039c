"""Speed and quality by the number of iterations: python examples/sweep.py

Generates the same 20 seeds at several K with `ar`. Prints the speed and the fraction that the classifier recognises.
"""

import time

import torch

import cspd
from cspd.evaluation.metrics import accuracy, load_classifier

engine = cspd.load("digits32", max_batch=10)
classifier = load_classifier("digits")
labels = torch.arange(20) % 10
for num_iter in (4, 8, 16, 32, 64):
    requests = []
    for seed, label in enumerate(labels.tolist()):
        requests.append(cspd.Request(label, seed=seed, method="ar", num_iter=num_iter, cfg=3.0))
    start = time.perf_counter()
    outputs = engine.generate(requests, progress=True)
    seconds = time.perf_counter() - start

    images = torch.stack([output.image for output in outputs])
    recognised = accuracy(classifier, images, labels)
    print(f"K = {num_iter:>2}: {len(outputs) / seconds:5.2f} images/s, {recognised:.0%} recognised")
