"""The log of a training run, which resumed runs continue, and its curves."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from cspd.files import append_json, publishing, write_bytes

LOG_EVERY = 10  # steps


class Log:
    """Writes the means of every LOG_EVERY steps to log.jsonl, and draws curves of them."""

    def __init__(self, run: Path, start: int) -> None:
        self.file, self.picture = run / "log.jsonl", run / "curves.png"
        self.pending: list[dict[str, float]] = []
        text = self.file.read_text() if self.file.exists() else ""
        lines = [
            line for line in text.splitlines(keepends=True) if line.endswith("\n")
        ]  # a full disk truncates the last line
        self.entries = [entry for entry in map(json.loads, lines) if entry["step"] <= start]
        if "".join(lines) != text or len(self.entries) < len(lines):  # steps after the last save are repeated
            write_bytes(self.file, "".join(json.dumps(entry) + "\n" for entry in self.entries).encode())

    def add(self, step: int, seconds: float, shown: dict[str, float]) -> None:
        self.pending.append(shown)
        if len(self.pending) == LOG_EVERY:
            self.write(step, seconds)

    def write(self, step: int, seconds: float) -> None:
        """Writes the means since the last line, if there were steps."""
        if not self.pending:
            return
        means = {name: sum(each[name] for each in self.pending) / len(self.pending) for name in self.pending[0]}
        self.pending.clear()
        self.note(step, seconds, means)

    def note(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        """Writes a line of numbers."""
        entry = {"step": step, "seconds": round(seconds, 1)}
        entry |= {name: round(number, 6) for name, number in numbers.items()}
        self.entries.append(entry)
        append_json(self.file, entry)

    def draw(self) -> None:
        if not self.entries:
            return
        together: dict[str, list[str]] = {}  # names with the same first word share axes
        for name in dict.fromkeys(name for entry in self.entries for name in entry):
            if name not in ("step", "seconds"):
                together.setdefault(name.split()[0], []).append(name)
        figure = Figure(figsize=(6, 2 * len(together)), layout="constrained")
        for axes, (word, names) in zip(
            figure.subplots(len(together), sharex=True, squeeze=False).flat, together.items()
        ):
            for name in names:
                own = [entry for entry in self.entries if name in entry]
                axes.plot([entry["step"] for entry in own], [entry[name] for entry in own], label=name)
            axes.set_ylabel(word)
            if len(names) > 1:
                axes.legend(fontsize="x-small")
        axes.set_xlabel("step")
        with publishing(self.picture) as temporary:
            FigureCanvasAgg(figure).print_png(temporary)
