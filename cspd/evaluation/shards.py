"""A run's images in numbered files, each whole or not there, and a manifest of all that they depend on.

Which images a file holds depends on its number alone, so that any number of processes can make them, and make up for
those that were cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cspd.evaluation.images import GRID
from cspd.evaluation.subjects import Subject, subject_of
from cspd.items import read_item, tell_damaged, write_item
from cspd.pixels import to_uint8
from cspd.records import MAYBE, misfit, parse_json
from cspd.sequence import Output
from cspd.store import Store
from cspd.summary import STATS

SCHEMA = "cspd.shards/1"
MANIFEST = "manifest.json"
RECORD = "evaluation.json"  # the report
SIZE = 16  # images a file: at most as many, beside those in flight, are lost with a process
LONG = ("by_lag", "by_step", "by_rank")  # statistics that are not kept
EXPLODED = 30.0  # MAR's tokens have unit variance; strong guidance may take them a third of this way
LARGEST = torch.finfo(torch.float32).max


class Shards(Dataset):
    """The folder of a run of `num` images; as a data set, its images, uint8 [3, H, W].

    A file is an .npz of `images` uint8 [n, H, W, 3], `labels` [n], int64 or texts, `seeds` int64 [n], and `stats`, as
    JSON.

    Attributes:
        manifest: what the images depend on; of use where files are written or checked.

    Raises:
        OSError: an image is read whose file is no longer of this `manifest`.
    """

    def __init__(self, folder: Path, num: int, manifest: Mapping | None = None) -> None:
        self.folder, self.num, self.manifest = folder, num, manifest or {}
        self.count = -(-num // SIZE)
        self._last: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.num:
            raise IndexError(index)
        shard = index // SIZE
        if self._last is None or self._last[0] != shard:
            self._last = shard, self._images(shard)
        return torch.from_numpy(self._last[1][index % SIZE]).permute(2, 0, 1)

    def name(self, shard: int) -> str:
        return f"{shard:05d}.npz"

    def indices(self, shard: int) -> range:
        """The images of a file."""
        return range(shard * SIZE, min((shard + 1) * SIZE, self.num))

    def there(self) -> list[int]:
        """The files there are, whole or damaged."""
        found = {path.name for path in self.folder.glob("*.npz")}
        return [shard for shard in range(self.count) if self.name(shard) in found]

    def images_there(self) -> int:
        """How many images there are in the files there are."""
        return sum(len(self.indices(shard)) for shard in self.there())

    def read(self, shard: int, name: str) -> np.ndarray:
        """One array of a file."""
        with np.load(self.folder / self.name(shard)) as file:
            return file[name]

    def _images(self, shard: int) -> np.ndarray:
        """The images of a file. A process that outlived the first of an earlier run may have written it since."""
        if not self.manifest:
            return self.read(shard, "images")
        path = self.folder / self.name(shard)
        arrays = read_item(path, self._made_of(shard), {})
        if arrays is None:
            raise OSError(
                f"{path} was changed meanwhile, as by a process of another run: end it and repeat the command"
            )
        return arrays["images"]

    def stats(self) -> Iterator[dict]:
        """What each image cost, see `RoundStats.to_dict`, and its `largest_token`, see `largest_tokens`."""
        for shard in range(self.count):
            yield from json.loads(str(self.read(shard, "stats")))

    def subjects(self) -> list[Subject]:
        """The class, or text, of each image."""
        return [label for shard in range(self.count) for label in self.read(shard, "labels").tolist()]

    def largest_tokens(self) -> dict:
        """The largest magnitude of MAR's tokens, and how many images reach `EXPLODED`.

        Both are None for VQ models, and where a file of an older version lacks them.
        """
        sizes = [stats.get("largest_token") for stats in self.stats()]
        if None in sizes:
            return dict.fromkeys(("largest_token", "exploded"))
        return {"largest_token": max(sizes), "exploded": sum(size >= EXPLODED for size in sizes)}

    def write(self, shard: int, arrays: dict[str, np.ndarray]) -> None:
        """Writes a file of `arrays_of` all its images, in order. Raises OSError as `publishing`."""
        write_item(self.folder / self.name(shard), arrays, self._made_of(shard))

    def missing(self, side: int) -> list[int]:
        """The files still to be made; damaged ones, and those of other images, are removed. `side`: in pixels."""
        there = self.there()
        damaged = [shard for shard in there if not self._is_whole(shard, side)]
        for shard in damaged:
            (self.folder / self.name(shard)).unlink(missing_ok=True)
        tell_damaged([self.name(shard) for shard in damaged])
        return sorted({*range(self.count)} - {*there} | {*damaged})

    def _made_of(self, shard: int) -> dict:
        """All that the images of a file depend on."""
        indices = self.indices(shard)
        subjects = self.manifest["labels"]
        seeds = [self.manifest["seed"] + i for i in indices]
        return {"manifest": self.manifest, "labels": [subjects[i % len(subjects)] for i in indices], "seeds": seeds}

    def _is_whole(self, shard: int, side: int) -> bool:
        num, made_of = len(self.indices(shard)), self._made_of(shard)
        like = {"images": (np.uint8, (num, side, side, 3)), "stats": (np.str_, ())}
        like |= {"labels": (np.generic, (num,)), "seeds": (np.integer, (num,))}
        arrays = read_item(self.folder / self.name(shard), made_of, like)
        if arrays is None or any(arrays[name].tolist() != made_of[name] for name in ("labels", "seeds")):
            return False
        try:
            stats = parse_json(str(arrays["stats"]))
        except ValueError:
            return False
        return misfit(stats, [STATS | {"largest_token?": MAYBE}]) is None and len(stats) == num


def store_of(folder: Path) -> Store:
    """The folder of a run that samples."""
    shape = {"images": int, "seed": int, "labels": [(int, str)], "request": dict}
    return Store(folder, MANIFEST, SCHEMA, shape, names=rf"\d+\.npz|{re.escape(RECORD)}|{re.escape(GRID)}")


def arrays_of(outputs: Sequence[Output]) -> dict[str, np.ndarray]:
    """What a file holds of its images."""
    return {
        "images": np.stack([to_uint8(output.image).permute(1, 2, 0).numpy() for output in outputs]),
        "labels": np.array([subject_of(output.request) for output in outputs]),
        "seeds": np.array([output.request.seed for output in outputs]),
        "stats": np.array(json.dumps([_stats_of(output) for output in outputs])),
    }


def _stats_of(output: Output) -> dict:
    stats = {name: value for name, value in output.stats.to_dict().items() if name not in LONG}
    if output.tokens.is_floating_point():
        tokens = output.tokens.nan_to_num(nan=LARGEST)  # JSON has no NaN and no infinity
        stats["largest_token"] = tokens.abs().max().item()
    return stats
