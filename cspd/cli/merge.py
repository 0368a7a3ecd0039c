"""`cspd merge`: the images of a run in shards as PNGs, an .npz or tars. `cspd verify`: whether images are whole."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cspd.cli.options import json_lines, read_prompts, text_files
from cspd.evaluation.images import (
    GRID,
    LIST,
    RECORD,
    check_npz,
    export_npz,
    file_name,
    in_turn,
    listed_images,
    read_list,
)
from cspd.evaluation.run import (
    MANIFEST,
    SIZE,
    Shards,
    digest_of_pixels,
    finish,
    run_in,
    write_grid,
    write_list,
)
from cspd.files import (
    Place,
    checked_json,
    digest_of,
    inside,
    open_arrays,
    ordinary,
    place_of,
    publishing,
    write_bytes,
)
from cspd.origin import file_fingerprint
from cspd.pixels import png_of, png_text, to_pil
from cspd.request import Request
from cspd.runs import Store, missing_files
from cspd.terminal import install, progress_bar
from mar.tensors import printable

# Images in other files than shards.

MERGED = "merged.json"  # the record of such a folder
SCHEMA = "cspd.merged/1"
IN_A_TAR = 1000
NO_TIME = 0.0  # of a tar's members: the same images make the same file
Write = Callable[[Place, list[dict], Shards], None]


def run_merge(args: argparse.Namespace) -> None:
    shards = run_in(place_of(args.folder))
    if args.npz:
        check_npz(args.npz)
    if args.tar:
        _writer_of_tars()  # raises now if the library is missing
    if (args.geneval or args.dpg) and not args.prompts:
        raise ValueError("--geneval and --dpg need the benchmark's own prompts: give --prompts")
    with finish(shards):
        wrote = [f"{shards.folder / LIST} (settings, digests)", f"{shards.folder / GRID}"]
        if args.npz:
            export_npz(shards, args.npz, shards.subjects())
            wrote.append(f"{args.npz} (for ADM's evaluator)")
        images = read_list(shards.folder) if args.png or args.tar else []
        if args.png:
            wrote.append(_merge_into(place_of(args.png), images, shards, "PNGs", _png_name, SIZE, _write_pngs))
        if args.tar:
            wrote.append(_merge_into(place_of(args.tar), images, shards, "tars", _tar_name, IN_A_TAR, _write_tar))
        if args.geneval:
            wrote.append(
                _lay_out(place_of(args.geneval), "GenEval's folder", geneval_files(shards, args.prompts), shards)
            )
        if args.dpg:
            wrote.append(_lay_out(place_of(args.dpg), "DPG-bench's folder", dpg_files(shards, args.prompts), shards))
    print(f"wrote {', '.join(wrote)}")


def _merge_into(
    folder: Place,
    images: Sequence[dict],
    shards: Shards,
    kind: str,
    name_of: Callable[[dict], str],
    at_once: int,
    write: Write,
) -> str:
    """Writes those files of a folder that are not there and whole; returns what it wrote, for people.

    Args:
        images: the entries of all images. name_of: the file of an image. at_once: images that a thread writes.
    """
    images = [{**image, "file": name_of(image)} for image in images]
    files = {file: list(group) for file, group in groupby(images, itemgetter("file"))}
    record = {"schema": SCHEMA, "kind": kind, "images": len(images), "run": digest_of({}, shards.manifest)}
    with Store(folder, MERGED, SCHEMA, {"images": int, "run": str}) as store:
        earlier = store.claim(record, [*files, LIST, GRID])
        store.begin(record)
        missing = set(files)
        if earlier:
            missing = set(missing_files(folder, files, lambda name: not _damage(folder, name, files[name])))
        chunks = [images[start : start + at_once] for start in range(0, len(images), at_once)]
        todo = [chunk for chunk in chunks if any(image["file"] in missing for image in chunk)]
        with (
            progress_bar(total=len(images), desc=kind, unit=" image") as bar,
            # compressing a PNG lets other threads run
            ThreadPoolExecutor(os.cpu_count()) as pool,
        ):
            bar.update(len(images) - sum(map(len, todo)))
            for count in pool.map(lambda chunk: _written(write, folder, chunk, missing, shards), todo):
                bar.update(count)
        write_list(folder, images)
        write_grid(folder, shards, shards.subjects())
    return f"{len(files)} {kind} in {folder}/"


def _written(write: Write, folder: Place, chunk: list[dict], missing: set[str], shards: Shards) -> int:
    write(folder, [image for image in chunk if image["file"] in missing], shards)
    return len(chunk)


def _png_name(image: dict) -> str:
    return file_name(image["index"], Request(**image["request"]))


def _write_pngs(folder: Place, images: list[dict], shards: Shards) -> None:
    for image in images:
        write_bytes(folder / image["file"], _png_of(image, shards))


def _png_of(image: dict, shards: Shards) -> bytes:
    """The PNG of an entry, with its settings as in the PNGs of `cspd sample`."""
    models = shards.models(image["index"])
    text = None if models is None else png_text(image["request"], models)
    return png_of(to_pil(shards[image["index"]]), text)


def _tar_name(image: dict) -> str:
    return f"{image['index'] // IN_A_TAR:05d}.tar"


def _write_tar(folder: Place, images: list[dict], shards: Shards) -> None:
    """Writes a tar with a PNG and its entry for each image, which have one key."""
    writer_of = _writer_of_tars()
    with publishing(folder / images[0]["file"]) as temporary:
        with temporary.open("wb") as file, writer_of(file, mtime=NO_TIME) as writer:
            for image in images:
                writer.write({"__key__": f"{image['index']:08d}", "png": _png_of(image, shards), "json": image})


def _writer_of_tars() -> Callable:
    try:
        from webdataset import TarWriter
    except ModuleNotFoundError:
        raise ValueError(f"--tar needs webdataset: {install('webdataset')}") from None
    return TarWriter


# The folders that text-to-image benchmarks score by their own programs. Image i of a run has the i-th prompt, cycled:
# an image of each prompt is followed by another of each.

Content = Callable[[], bytes]
PICTURES = 4  # of a prompt, in DPG-bench's grids of 2x2


def _lay_out(folder: Place, kind: str, files: Mapping[str, Content], shards: Shards) -> str:
    """Writes the files of a folder, by name; returns what it wrote, for people."""
    record = {"schema": SCHEMA, "kind": kind, "images": shards.num, "run": digest_of({}, shards.manifest)}
    with Store(folder, MERGED, SCHEMA, {"images": int, "run": str}) as store:
        store.claim(record, list(files))
        store.begin(record)
        for name, content in progress_bar(files.items(), desc=kind, unit=" file"):
            write_bytes(folder / name, content())
    return f"{folder}/ ({kind})"


def _prompts_of_run(shards: Shards, path: Path) -> list[str]:
    """The prompts in a benchmark's file. Raises ValueError unless the run's images are those of all of them."""
    prompts = read_prompts(path)
    if shards.num % len(prompts) or shards.subjects() != in_turn(prompts, shards.num):
        raise ValueError(
            f"{shards.folder} has {shards.num} images of other prompts, or not equally many of each of the"
            f" {len(prompts)} in {path}: make them by `cspd evaluate --prompts {path}`, --num a multiple"
        )
    return prompts


def geneval_files(shards: Shards, path: Path) -> dict[str, Content]:
    """The files of GenEval (arXiv 2310.11513): a folder of each prompt with its metadata and images.

    `path`: its evaluation_metadata.jsonl. Raises ValueError if the file has prompts alone.
    """
    if path.suffix != ".jsonl":
        raise ValueError(
            f"{path} has no metadata, which GenEval needs: give its evaluation_metadata.jsonl as --prompts"
        )
    num = len(_prompts_of_run(shards, path))
    files: dict[str, Content] = {}
    for i, (_, line) in enumerate(json_lines(path)):
        files[f"{i:05d}/metadata.jsonl"] = line.encode
    for index in range(shards.num):
        name = f"{index % num:05d}/samples/{index // num:04d}.png"
        files[name] = functools.partial(_png_of_index, shards, index)
    return files


def dpg_files(shards: Shards, path: Path) -> dict[str, Content]:
    """The files of DPG-bench (arXiv 2403.05135): a grid of the first four images of each prompt, named as its text.

    `path`: the folder of its prompts.
    """
    num = len(_prompts_of_run(shards, path))
    if shards.num < PICTURES * num:
        raise ValueError(f"--dpg needs {PICTURES} images of each prompt: {PICTURES * num}, and there are {shards.num}")
    return {f"{file.stem}.png": functools.partial(_grid_of, shards, i, num) for i, file in enumerate(text_files(path))}


def _png_of_index(shards: Shards, index: int) -> bytes:
    return png_of(to_pil(shards[index]))


def _grid_of(shards: Shards, prompt: int, num: int) -> bytes:
    """The first four images of a prompt in two rows."""
    pictures = [shards[prompt + i * num] for i in range(PICTURES)]
    rows = [torch.cat(pictures[start : start + 2], dim=2) for start in (0, 2)]
    return png_of(to_pil(torch.cat(rows, dim=1)))


# Whether images are whole.

SHOWN = 20  # damaged files that are printed


def run_verify(args: argparse.Namespace) -> int:
    folder = place_of(args.folder)
    images = listed_images(folder)
    is_run = (folder / MANIFEST).exists()
    num = _num_asked(folder)
    if not images and not is_run and not num:
        raise ValueError(f"{folder} has no {MANIFEST}, {LIST} or {RECORD}: give a folder that cspd has written")
    wrong: dict[str, str] = {}
    if num > len(images):
        wrong[RECORD] = f"lists {len(images)} of {num} images: repeat the command that makes them"
    if is_run:
        shards = run_in(folder)
        for shard in progress_bar(range(shards.count), desc="shards", unit=" shard"):
            if not shards.is_whole(shard):
                wrong[shards.name(shard)] = "missing, damaged, or of another run"
        images = images or [{}] * shards.num
    if all(images):
        for file, group in groupby(progress_bar(images, desc="digests", unit=" image"), itemgetter("file")):
            damage = _damage(folder, file, list(group))
            if damage:
                wrong.setdefault(file, damage)
    for file, damage in list(wrong.items())[:SHOWN]:
        print(printable(f"{folder / file}: {damage}"))
    if wrong:
        print(f"{len(wrong)} files of {folder}/ are wrong")
        return 1
    print(f"all {len(images)} images in {folder}/ are whole")
    return 0


def _num_asked(folder: Place) -> int:
    """The number of images that the record of `cspd sample` promises, finished or not; 0 without such a record."""
    with contextlib.suppress(ValueError):
        return checked_json(folder / RECORD, {"requests": int}, "")["requests"]
    return 0


def _damage(folder: Place, file: str, images: list[dict]) -> str | None:
    """What is wrong with a file of these images, or None."""
    expected = [image.get("sha256") for image in images]
    try:
        path = ordinary(inside(folder, file))
    except (OSError, ValueError) as error:
        return str(error)
    if not path.exists():
        return "missing"
    try:
        found = [file_fingerprint(path)]
        if found != expected:  # the record of `cspd sample` has digests of files
            found = [digest_of_pixels(image) for image in _images_in(path)]
    except Exception:  # the readers of a damaged file raise almost anything
        return "damaged"
    if None in expected:
        return "has no digest: an older version wrote it"
    if found == expected:
        return None
    if len(found) != len(expected):
        return f"has {len(found)} images, not {len(expected)}"
    first = next(image for image, digest in zip(images, found) if digest != image["sha256"])
    return f"image {first.get('index')} is damaged, or another one"


def _images_in(path: Place) -> Iterator[Tensor]:
    """uint8 [3, H, W] of each image in a PNG, tar or shard."""
    if path.name.endswith(".npz"):
        with open_arrays(path) as arrays:
            for pixels in arrays["images"]:
                yield torch.from_numpy(pixels).permute(2, 0, 1)
        return
    with path.open("rb") as opened:
        if path.name.endswith(".tar"):
            # ours are not compressed, and "r:" refuses others: a few bytes could fill the memory
            with tarfile.open(fileobj=opened, mode="r:") as archive:
                for member in archive:
                    if member.isreg() and not member.issparse() and member.name.endswith(".png"):
                        yield _pixels(archive.extractfile(member))  # type: ignore[arg-type]
        else:
            yield _pixels(opened)


def _pixels(png: IO[bytes]) -> Tensor:
    with Image.open(png, formats=["PNG"]) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
