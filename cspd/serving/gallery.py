"""The gallery of the page: a folder where `cspd serve` saves the finished pictures of the page, and what it holds."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from cspd.files import inside, write_bytes
from cspd.option import without_removed
from cspd.pixels import PNG_TEXT
from cspd.serving.loop import exact, public
from cspd.terminal import say

LONGEST_NAME = 40  # characters of the class or prompt in the name of a file


class Gallery:
    """A folder of PNGs that carry their settings, such as this server and `cspd sample` write. Other files are ignored.

    Args:
        folder: is made when the first picture is saved.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, event: dict) -> str | None:
        """Saves the picture of a last event, see `cspd.serving.loop.shown`. A picture that is there already is kept.

        Returns:
            The name of the file; None if it cannot be written, which the error stream tells.
        """
        png = base64.b64decode(event["image"].partition(",")[2])
        words = "-".join(re.findall(r"\w+", event["class_name"]))[:LONGEST_NAME]
        # of one content, also after a repeated request, there is one file
        name = f"{words}_seed{event['seed']}_{hashlib.sha256(png).hexdigest()[:8]}.png"
        path = self.folder / name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_bytes(path, png)
        except OSError as error:
            say(f"a picture is not saved: {error}")
            return None
        return name

    def newest(self, num: int) -> list[dict]:
        """The last `num` pictures, the newest one first: "file", and the settings as in `cspd.pixels.png_text`."""
        found = []
        for path in self._files():
            settings = _settings(path)
            if settings is not None:
                found.append({"file": path.name, **settings})
            if len(found) == num:
                break
        return found

    def read(self, name: str) -> bytes:
        """The content of a picture. Raises FileNotFoundError if the gallery has none of this name."""
        with contextlib.suppress(ValueError):  # the name leads out of the folder
            path = inside(self.folder, name)
            if isinstance(path, Path) and path.suffix == ".png" and _settings(path) is not None:
                return path.read_bytes()
        raise FileNotFoundError(name)

    def _files(self) -> Iterator[Path]:
        """The PNGs, the newest one first."""
        dated = []
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(".png") and entry.is_file():
                    dated.append((entry.stat().st_mtime_ns, entry.path))
        return (Path(path) for _, path in sorted(dated, reverse=True))


def _settings(path: Path) -> dict | None:
    """The settings that a PNG carries, without folders of this machine; None if it carries none."""
    try:
        with Image.open(path, formats=["png"]) as image:  # reads the texts before the pixels only
            settings = json.loads(image.info[PNG_TEXT])
            models = {
                name: public(each) if isinstance(each, str) else each for name, each in settings["models"].items()
            }
            request = {name: exact(value) for name, value in without_removed(settings["request"]).items()}
    except Exception:  # no PNG, or one of others: a damaged image makes its reader raise almost anything
        return None
    return {"models": models, "settings": request}
