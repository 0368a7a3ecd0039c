"""A run's images in numbered files, each whole or not there, and a manifest of all that they depend on.

Which images a file holds depends on its number alone, so that any number of processes can make them, and make up for
those that were cut off.
"""

from __future__ import annotations

import contextlib
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cspd.plots import to_uint8
from cspd.records import differences, earlier_record, make_folder, publishing, refuse_other, write_json
from cspd.sequence import Output

SCHEMA = "cspd.shards/1"
MANIFEST = "manifest.json"
RECORD, GRID = "evaluation.json", "grid.png"  # the report
SIZE = 16  # images a file: at most as many, beside those in flight, are lost with a process
LONG = ("by_lag", "by_step", "by_rank")  # statistics that are not kept


class Shards(Dataset):
    """The folder of a run of `num` images; as a data set, its images, uint8 [3, H, W].

    A file is an .npz of `images` uint8 [n, H, W, 3], `labels` and `seeds` int64 [n], and `stats`, their JSON.
    """

    def __init__(self, folder: Path, num: int) -> None:
        self.folder, self.num = folder, num
        self.count = -(-num // SIZE)
        self._last: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.num:
            raise IndexError(index)
        shard = index // SIZE
        if self._last is None or self._last[0] != shard:
            self._last = shard, self.read(shard, "images")
        return torch.from_numpy(self._last[1][index % SIZE]).permute(2, 0, 1)

    def path(self, shard: int) -> Path:
        return self.folder / f"{shard:05d}.npz"

    def indices(self, shard: int) -> range:
        """The images of a file."""
        return range(shard * SIZE, min((shard + 1) * SIZE, self.num))

    def there(self) -> list[int]:
        """The files there are, whole or damaged."""
        found = {path.name for path in self.folder.glob("[0-9]*.npz")}
        return [shard for shard in range(self.count) if self.path(shard).name in found]

    def images_there(self) -> int:
        """How many images there are in the files there are."""
        return sum(len(self.indices(shard)) for shard in self.there())

    def read(self, shard: int, name: str) -> np.ndarray:
        """One array of a file."""
        with np.load(self.path(shard)) as file:
            return file[name]

    def stats(self) -> Iterator[dict]:
        """What each image cost, see `RoundStats.to_dict`."""
        for shard in range(self.count):
            yield from json.loads(str(self.read(shard, "stats")))

    def labels(self) -> list[int]:
        return [label for shard in range(self.count) for label in self.read(shard, "labels").tolist()]

    def write(self, shard: int, arrays: dict[str, np.ndarray]) -> None:
        """Writes a file of `arrays_of` all its images, in order. Raises OSError as `publishing`."""
        with publishing(self.path(shard)) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)

    def missing(self) -> list[int]:
        """The files still to be made; damaged ones and the halves of processes that are gone are removed."""
        make_folder(self.folder)
        whole = set()
        for shard in self.there():
            if self._is_whole(shard):
                whole.add(shard)
            else:
                self.path(shard).unlink(missing_ok=True)
        return [shard for shard in range(self.count) if shard not in whole]

    def _is_whole(self, shard: int) -> bool:
        try:
            with np.load(self.path(shard)) as file:  # reading to the end compares checksums
                arrays = {name: file[name] for name in ("images", "labels", "seeds", "stats")}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return False
        return all(len(arrays[name]) == len(self.indices(shard)) for name in ("images", "labels", "seeds"))

    def earlier(self) -> dict | None:
        """The manifest that is there. Raises ValueError as `earlier_record`."""
        return earlier_record(self.folder / MANIFEST, SCHEMA, "[0-9]*.npz", {"request": dict})

    def claim(self, manifest: dict) -> None:
        """Makes the folder this run's, or finds that it is.

        Raises:
            ValueError: it holds a run of other settings, which are named. OSError: it cannot be written.
        """
        earlier = self.earlier()
        if earlier is None:
            make_folder(self.folder)
            with contextlib.suppress(FileExistsError):  # another run was quicker: the same, or refused below
                write_json(self.folder / MANIFEST, manifest, new=True)
            earlier = self.earlier()
        refuse_other(self.folder, differences(earlier, manifest))

    def clear(self) -> None:
        """Removes a run's files and its report; the manifest last, without which images are no one's."""
        for pattern in ("[0-9]*.npz", "[0-9]*.tmp", RECORD, GRID, MANIFEST):
            for path in self.folder.glob(pattern):
                path.unlink()


def arrays_of(outputs: Sequence[Output]) -> dict[str, np.ndarray]:
    """What a file holds of its images."""
    return {
        "images": np.stack([to_uint8(output.image).permute(1, 2, 0).numpy() for output in outputs]),
        "labels": np.array([output.request.label for output in outputs]),
        "seeds": np.array([output.request.seed for output in outputs]),
        "stats": np.array(json.dumps([_short(output.stats.to_dict()) for output in outputs])),
    }


def _short(stats: dict) -> dict:
    return {name: value for name, value in stats.items() if name not in LONG}
