"""The report of a comparison: tables, the page, plots of speed and quality, and the verdict of a search."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from PIL import Image
from tabulate import tabulate

from cspd.comparison.study import OWN_RUN, PUBLISHED
from cspd.evaluation.images import are_texts, in_turn
from cspd.evaluation.metrics import titled
from cspd.evaluation.scores import student_limit
from cspd.files import link_of, write_bytes, write_json
from cspd.method import GUARANTEES
from cspd.origin import model_line
from cspd.pixels import png_of
from cspd.plots import Curves, Panel, PlotPoint, beside, curves, seed_grid, speed_quality, stacked

# The report of `cspd compare` as text, Markdown and CSV.


class Column(NamedTuple):
    """A column: its key in a row, its title, the format of its numbers, and their meaning."""

    key: str
    title: str
    form: str
    meaning: str


# in the order of the table, which leaves out a column without any value
COLUMNS = [
    Column("name", "configuration", "", "Its name in the study, or its method and settings as --methods takes them."),
    Column(
        "guarantee", "guarantee", "", "How the distribution of its images relates to baseline sampling's, see below."
    ),
    Column("images_per_second", "images/s", ".2f", "Median over the turns (min..max), decoding included."),
    Column(
        "latency",
        "latency",
        ".2f",
        "Seconds of a turn, which has {max_batch} images at once, decoding included: mean{deviation}.",
    ),
    Column("speed_up", "speed-up", ".2f", "Relative to {baseline}, turn by turn: median (min..max)."),
    Column(
        "expected_speed_up",
        "by eq. 35",
        ".2f",
        "The speed-up that CSpD's eq. 35 expects of alpha, gamma and the cost ratio c, see below.",
    ),
    Column(
        "cost_ratio", "c", ".2f", "Time of a run of the draft model, relative to one of the target in the baseline."
    ),
    Column(
        "first_timestep",
        "first timestep",
        "d",
        "The timestep, of 1000, at which its denoising chains begin, if it is set; MAR's own chains begin at 999.",
    ),
    Column(
        "head_calls_per_token",
        "head calls/token",
        ".1f",
        "Sequential calls of the diffusion head for one token. A cached head counts calls that evaluate its blocks.",
    ),
    Column(
        "window",
        "window",
        "d",
        "Denoising steps drafted ahead (0: baseline sampling); for Jacobi methods, tokens verified at once.",
    ),
    Column("backbone_calls", "backbone calls", ".1f", "Forward passes of the target's transformer for one image."),
    Column(
        "lazy_backbone_calls",
        "lazy calls",
        ".1f",
        "Those of the backbone calls that compute only part of the transformer, since the rest is cached.",
    ),
    Column("draft_backbone_calls", "draft calls", ".1f", "Forward passes of the draft model for one image."),
    Column(
        "step_compression",
        "tokens per forward pass",
        ".2f",
        "VQ tokens committed per forward pass of the target: mean over the images{deviation}.",
    ),
    Column("alpha", "alpha", ".3f", "Acceptance rate: accepted drafts divided by verified drafts."),
    Column(
        "accuracy", "class acc.", ".3f", "Fraction of the images that the classifier assigns to their class{interval}."
    ),
    Column(
        "fid",
        "FID-{images}",
        ".2f",
        "Frechet distance between the features of the images and of the reference{interval}; lower is better.",
    ),
    Column("inception_score", "IS", ".2f", "Inception score, by the same classifier{interval}; higher is better."),
    Column("clip_score", "CLIP", ".2f", "CLIP score of the images and their prompts{interval}; higher is better."),
    Column(
        "clip_difference",
        "CLIP change",
        "+.2f",
        "Mean difference of the CLIP scores from baseline sampling's, of the same prompts and seeds{interval}.",
    ),
    Column(
        "bound",
        "TV bound",
        ".3f",
        "Upper bound of the total variation distance from the target's distribution{interval}; 1 guarantees nothing.",
    ),
    Column(
        "difference",
        "difference",
        ".3f",
        "Root mean square difference between its tokens and those of the full chain, with the same conditions and"
        " noise, on held-out tokens, in standard deviations of a token{interval}.",
    ),
    Column("difference_worst_percent", "worst 1 %", ".3f", "The difference that 1 % of these tokens reach."),
    Column(
        "audit",
        "audit",
        ".3f",
        "KL divergence of its tokens' chains or, of VQ models, of its tokens' distributions from those of baseline"
        " sampling with the same conditions, on these images{interval}; nats per token.",
    ),
    Column(
        "pixel_difference",
        "pixel difference",
        ".1f",
        "Root mean square difference of pixels, 0 to 255, from baseline sampling of the same seeds. If it is small, the"
        " images are nearly the same. A large one says nothing: an exact method may sample other images.",
    ),
    Column(
        "peak_bytes",
        "peak MiB",
        ".0f",
        "Peak memory while it ran, of the GPU or else of this process, including the models of all configurations.",
    ),
    Column(
        "p_value_holm",
        "p coupled",
        ".3f",
        "Two-sample test of the images' features against baseline sampling of the same seeds, see below.",
    ),
    Column("p_unpaired_holm", "p unpaired", ".3f", "The same test against baseline sampling of other seeds."),
    Column(
        "verdict",
        "against ar",
        "",
        "What differs from baseline sampling, of the features' distribution and the scores, at 95 %.",
    ),
]
REPEATED = ("alpha", "accuracy", "fid", "inception_score")  # have a mean over repeats


def _with_others(columns: Sequence[Column]) -> list[Column]:
    """The columns, each followed by a paper's number and by the mean over repeats, if there may be such."""
    found = []
    for column in columns:
        key, title, form, _ = column
        found.append(column)
        if key in REPEATED:
            mean_title = f"mean {title.replace('{images}', '{per_repeat}')}"
            meaning = "Mean and standard deviation over {repeats} repeats of {per_repeat} images."
            found.append(Column(f"repeats.{key}", mean_title, form, meaning))
        if key in PUBLISHED:
            published = f"published {title.removesuffix('-{images}')}"
            found.append(Column(f"paper.{key}", published, form, "The number in the paper, of its own models."))
    return found


COLUMNS = _with_others(COLUMNS)
# the columns that have an interval, as {key}_ci95
INTERVALS = ("accuracy", "fid", "inception_score", "clip_score", "clip_difference", "bound", "difference", "audit")
INTERVAL = " [95 % interval]"
DEVIATION = " ± standard deviation"
WIDTH = 120  # of the table and the notes in a terminal


def at(row: dict, key: str) -> Any:
    """A row's value; "paper.fid" is a value of a mapping in the row, if that has it."""
    name, dot, of = key.partition(".")
    if not dot:
        return row[key]
    return (row.get(name) or {}).get(of)


def value_of(row: dict, key: str) -> Any:
    """A row's value, or the median of its values."""
    value = row[key]
    return value["median"] if isinstance(value, dict) else value


def columns(report: dict) -> list[Column]:
    """The columns that some row has a value for, with titles and meanings filled in."""
    shown = []
    for column in COLUMNS:
        if any(at(row, column.key) is not None for row in report["rows"]):
            title = _title(column, report)
            words = {"interval": INTERVAL, "deviation": DEVIATION, "per_repeat": _per_repeat(report)}
            meaning = column.meaning.format(**report, **words)
            shown.append(column._replace(title=title, meaning=meaning))
    return shown


def _per_repeat(report: dict) -> int:
    return report["images"] // report["repeats"]


def _title(column: Column, report: dict) -> str:
    title = column.title.format(**report, per_repeat=_per_repeat(report))
    is_of_space = column.key.removeprefix("repeats.") in ("fid", "inception_score")
    return titled(title, report["space"]) if is_of_space else title


def cell(row: dict, column: Column, short: bool = False) -> str:
    """A row's value as text, empty if it has none. `short`: without a spread, except the speed-up's."""
    value = at(row, column.key)
    if value is None:
        return ""
    if isinstance(value, dict) and "sd" in value:
        # over the repeats
        return f"{format(value['mean'], column.form)} ± {format(value['sd'], column.form)}"
    if isinstance(value, dict):
        # over the turns
        low, median, high = (format(value[name], column.form) for name in ("min", "median", "max"))
        is_alone = short and column.key == "images_per_second"
        if is_alone or value["min"] == value["max"]:
            return median
        return f"{median} ({low}..{high})"
    if column.key == "peak_bytes":
        value = value / 2**20
    text = format(value, column.form)
    deviation = row.get(f"{column.key}_sd")
    if deviation is not None and not short:
        return f"{text} ±{deviation:{column.form}}"
    interval = row.get(f"{column.key}_ci95")
    if interval is None or short:
        return text
    low, high = (format(end, column.form) for end in interval)
    return f"{text} [{low}, {high}]"


def notes(report: dict, short: bool = False) -> list[str]:
    """The explanations that a reader of the table needs, a sentence or two each; `short` as in `cell`."""
    rows = report["rows"]
    images = report["images"]

    def has(key: str) -> bool:
        return any(row[key] is not None for row in rows)

    def has_other(key: str, usual: object) -> bool:
        return any(row.get(key, usual) != usual for row in rows)

    turns = _counted(len(rows[0]["seconds"]), "turn")
    size = _counted(min(images, report["max_batch"]), "image")
    lines = [f"speed-up: relative to {report['baseline']!r}, median of {turns} of {size}"]
    if has_other("speed_baseline", report["baseline"]):
        lines.append("speed-up of another target or batch size: relative to baseline sampling with the same")
    if has_other("expected_speed_up", None):
        lines.append(
            "by eq. 35: the speed-up that a round would have that ends at the first rejection, and in which the target"
            " verifies many tokens in the time of one. `parallel` verification ends no round, so that alpha does not"
            " change its speed"
        )
    if has("p_value_holm"):
        lines.append(
            "p coupled: two-sample test of the images' features against baseline sampling (ar) with the same settings,"
            " paired by class and seed, corrected for the number of rows (Holm). A small p (0.01) says that the"
            f" distributions differ. A large p says that {images} images show no difference. Images of one seed share"
            " their noise: p is exact only if exchanging them changes nothing, otherwise approximate"
        )
    if any(row["p_value_holm"] is not None and row["method"] == "ar" for row in rows):
        lines.append("p of an ar with other denoising steps: against baseline sampling with the first row's chain")
    if has("p_unpaired_holm"):
        lines.append(
            "p unpaired: the same test against baseline sampling of other seeds. It misses small differences, which p"
            " finds if the images of one seed are nearly equal. Rows with nearly equal images have nearly the same"
            " luck: compare their p with that of baseline sampling itself"
        )
    if not short and any(has(f"{key}_ci95") for key in INTERVALS):
        lines.append(
            "[min, max]: a 95 % interval, given the reference. The class accuracy has Wilson's; FID and IS have the"
            " infinitesimal jackknife's"
        )
    worst = [row for row in rows if row.get("worst_images")]
    if worst:
        told = ", ".join(f"{row['name']} {row['worst_images'][0]['pixel_difference']:.0f}" for row in worst)
        lines.append(f"the image that differs most from ar's of the same noise, in pixels (worst.png): {told}")
    if has("fid"):
        lines.append(
            f"FID-{images}: of {images} images, not of the customary 50,000. With few images it is higher: compare it"
            " within this table only"
        )
    resolutions = [row["fid_resolution"] for row in rows if row["fid_resolution"] is not None]
    if resolutions:
        lines.append(
            f"FIDs of different seeds that differ by less than {max(resolutions):.2f} cannot be told apart with"
            f" {images} images"
        )
    return lines + _missing(report)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _missing(report: dict) -> list[str]:
    """The reasons for missing columns, one note each."""
    # several columns are often missing for one reason, such as no reference
    titles_by_reason: dict[str, list[str]] = {}
    for column in COLUMNS:
        reason = report["missing"].get(column.key)
        if reason is not None:
            title = _title(column, report)
            titles_by_reason.setdefault(reason, []).append(title)
    return [f"no {', '.join(titles)}: {reason}" for reason, titles in titles_by_reason.items()]


def length_tests(report: dict) -> list[list[str]]:
    """A table of the paired t-tests of tokens per forward pass, with the names of rows; [] if there are none.

    Positive: the row's tokens per forward pass are more than the column's.
    """
    tested = [row for row in report["rows"] if row["step_compression_tests"]]
    if not tested:
        return []
    names = [row["name"] for row in tested]
    table = [["", *names]]
    for row in tested:
        cells = []
        for name in names:
            test = row["step_compression_tests"].get(name)
            if test is None:
                cells.append("")
            elif test["t"] is None:  # all pairs differ by as much
                cells.append(f"{test['difference']:+.2f}")
            else:
                cells.append(f"t {test['t']:+.1f} (p {test['p_value']:.1g})")
        table.append([row["name"], *cells])
    return table


def own_seeds(report: dict) -> bool:
    """Whether some row has its own seeds."""
    return any("seed" in row["settings"] for row in report["rows"])


def text_table(report: dict) -> str:
    """The table and its notes for a terminal. Columns for which it is too narrow continue below."""
    # each part begins with the names
    name, *others = columns(report)
    tables = []
    part = [name]
    for column in others:
        table = _plain(report, [*part, column])
        if max(map(len, table.splitlines())) > WIDTH:
            tables.append(_plain(report, part))
            part = [name]
        part.append(column)
    tables.append(_plain(report, part))
    filled = [textwrap.fill(f"* {note}", WIDTH, subsequent_indent="  ") for note in notes(report, short=True)]
    return "\n".join(["\n\n".join(tables), *filled])


def _plain(report: dict, shown: list[Column]) -> str:
    """Some columns for a terminal, with two lines for their titles."""
    above, below = [], []
    for column in shown:
        first, _, last = column.title.rpartition(" ")
        above.append(first)
        below.append(last)
    lines = [[cell(row, column, short=True) for column in shown] for row in report["rows"]]
    return tabulate([above, below, *lines], tablefmt="plain", **_layout(shown))


def markdown(report: dict) -> str:
    """The table and its notes in Markdown."""
    shown = columns(report)
    titles = [column.title for column in shown]
    lines = [[_escaped(cell(row, column)) for column in shown] for row in report["rows"]]
    table = tabulate(lines, titles, tablefmt="pipe", **_layout(shown))
    explained = [f"* {_escaped(note)}\n" for note in notes(report)]
    return "".join([table, "\n\n", *explained])


def _escaped(text: str) -> str:
    """Text that Markdown shows unchanged, on one line."""
    # a name in a study may have any characters
    return re.sub(r"([\\`*_\[\]<>&|~$])", r"\\\1", " ".join(text.splitlines()))


def _layout(shown: list[Column]) -> dict:
    """tabulate's options: names and guarantees at the left, numbers at the right and unchanged."""
    sides = ["left" if column.key in ("name", "guarantee", "verdict") else "right" for column in shown]
    return {"colalign": sides, "disable_numparse": True}


def csv_table(report: dict) -> str:
    """All columns with all digits: three for a spread, two for an interval. Empty: not measured."""
    lines = [_flat(row) for row in report["rows"]]
    fields = dict.fromkeys(key for line in lines for key in line)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def _flat(row: dict) -> dict[str, object]:
    """A row whose values each fit a cell of a CSV file."""
    flat: dict[str, object] = {}
    for key, value in row.items():
        if isinstance(value, dict) and value.keys() == {"median", "min", "max"}:
            # a spread over the turns
            flat[key] = value["median"]
            flat[f"{key}_least"] = value["min"]
            flat[f"{key}_most"] = value["max"]
        elif key.endswith("_ci95"):
            low, high = value or (None, None)
            flat[f"{key}_least"] = low
            flat[f"{key}_most"] = high
        elif isinstance(value, (dict, list)):
            flat[key] = json.dumps(value)
        else:
            flat[key] = value
    return flat


WORSE = {"fid": 1, "inception_score": -1, "accuracy": -1}  # the direction in which each gets worse


# The report of `cspd tune`: the Pareto front as a table, and the choice or the nearest candidate.

NAMES = {"fid": "FID", "inception_score": "IS", "accuracy": "class accuracy", "divergence": "divergence"}
SHOWN = ("name", "images_per_second", "speed_up", "fid", "inception_score", "accuracy", "difference", "guarantee")
AGAINST = "FID against ar"


def wanted(limits: Mapping[str, float]) -> str:
    """The limits in words: "FID at most 2 % worse"."""
    words = []
    for name, limit in limits.items():
        if name != "divergence":
            words.append(f"{NAMES[name]} at most {100 * limit:.3g} % worse")
        elif limit:
            words.append(f"a divergence of at most {limit:g} nats per token")
        else:
            words.append("exact")
    return ", ".join(words)


def against_plain(row: dict, name: str) -> str:
    """The difference of a row's value from baseline sampling's, with half of a 95 % interval; empty if unknown."""
    loss = row["losses"][name]
    if loss is None:
        return ""
    if name == "divergence":
        return f"{loss['loss']:.3g}"
    change = 100 * WORSE[name] * loss["loss"]
    return f"{change:+.1f} % ±{100 * half_interval(loss):.1f}"


def half_interval(loss: dict) -> float:
    """Half of a loss's 95 % interval."""
    return student_limit(loss["degrees"]) * loss["error"]


def front_table(report: dict) -> str:
    """The front for a terminal, the fastest last, between baseline sampling and the same with other seeds."""
    baseline, other_seeds, *candidates = report["rows"]
    front = [row for row in candidates if row["front"]]
    front.sort(key=lambda row: value_of(row, "images_per_second"))
    # other seeds come last: what is no farther from `ar` than they are cannot be told from it
    shown = [baseline, *front, other_seeds]
    filled = {column.key: column for column in columns(report | {"rows": shown})}
    table = {}
    for key in SHOWN:
        if key in filled:
            column = filled[key]
            table[column.title] = [cell(row, column, short=True) for row in shown]
        if key == "fid" and key in filled:
            compared = [against_plain(row, "fid") for row in [*front, other_seeds]]
            table[AGAINST] = ["", *compared]
    # numbers are shown as `cell` has them, with all their digits
    aligned = ["left"] + ["right"] * (len(table) - 1)
    return tabulate(table, "keys", tablefmt="plain", colalign=aligned, disable_numparse=True)


def choice_told(report: dict) -> str:
    """The chosen row in a sentence; and a faster one, if more images might show that it is within the limits."""
    tuned = report["tune"]
    row: Any = _named(report, tuned["chosen"])
    sentence = f"{_fast(row)} as ar, the fastest with {wanted(tuned['limits'])}"
    return f"{sentence}; {_unresolved(report)}" if tuned["unresolved"] else sentence


def shortfall(report: dict) -> str:
    """The nearest row to the limits, in a sentence, if no row is chosen."""
    tuned = report["tune"]
    if tuned["unresolved"]:
        return _unresolved(report)
    sentence = f"no configuration that is faster than ar is within the limits ({wanted(tuned['limits'])})"
    row = _named(report, tuned["nearest"])
    if row is None:
        return f"{sentence}: no candidate was left; take ar"
    values = [f"{NAMES[name]} {against_plain(row, name) or 'unknown'}" for name in tuned["limits"]]
    return f"{sentence}: the nearest is {_fast(row)}, {', '.join(values)}; allow more, or take ar"


def _unresolved(report: dict) -> str:
    """The row that may be within the limits, and the number of images that would tell."""
    tuned = report["tune"]
    row: Any = _named(report, tuned["unresolved"])
    values, wants = [], []
    needed = 0.0
    for name, limit in tuned["limits"].items():
        loss = row["losses"][name]
        if loss["loss"] + half_interval(loss) > limit:
            values.append(f"{NAMES[name]} {against_plain(row, name)}")
            wants.append(f"{100 * limit:.3g} %")
            needed = max(needed, images_needed(loss, limit, report["images"]))
    sentence = f"not resolved: {_fast(row)}, {', '.join(values)} with {report['images']} images"
    if math.isinf(needed):
        return f"{sentence}: no number of images tells a limit of {', '.join(wants)}; allow more"
    return f"{sentence}: {', '.join(wants)} needs about {needed:.0f} images, and --num {needed:.0f} resumes the search"


def images_needed(loss: dict, limit: float, images: int) -> float:
    """About how many images make half of a loss's 95 % interval as small as the limit, to two digits, rounded up."""
    if limit <= 0:
        return math.inf
    exact = images * (half_interval(loss) / limit) ** 2
    unit = 10.0 ** max(0, math.floor(math.log10(exact)) - 1)
    return math.ceil(exact / unit) * unit


def _named(report: dict, name: str | None) -> dict | None:
    return next((row for row in report["rows"] if row["name"] == name), None)


def _fast(row: dict) -> str:
    return f"{row['name']}, {value_of(row, 'speed_up'):.2f} times as fast"


# The files of `cspd compare` and `cspd tune`: tables, images, and one HTML file that has everything.

PAGE_COLUMNS = 10  # images of a row, at most
MOST_WIDTH = 112  # of an image on the page, in pixels of a browser


class PagePicture(NamedTuple):
    """An image of the page: its title, and the PNG file's content."""

    title: str
    png: bytes

    @property
    def link(self) -> str:
        """The PNG as a data link."""
        return link_of(self.png)


class Strip(NamedTuple):
    """A configuration's images on the page."""

    name: str
    pictures: Sequence[PagePicture]


def write(report: dict, images: Sequence[np.ndarray], out: Path) -> list[str]:
    """Writes the report in all forms and returns the files' names. `images`: of each row, uint8 [N, H, W, 3].

    The folder is claimed: its files with these names belong to an earlier report.
    """
    panels = _panels(report)
    plots = []
    for panel, png in zip(panels, speed_quality(panels)):
        plots.append(PagePicture(f"{panel.quality} against {panel.speed}", png))
    accepted = acceptance_curves(report)
    of_drafts = []
    for lines, png in zip(accepted, curves(accepted)):
        of_drafts.append(PagePicture(f"{lines.y} by {lines.x}", png))
    heads = _heads(report)
    strips = []
    grid_rows = []
    for row, row_images in zip(report["rows"], images):
        name = row["name"]
        first_images = [Image.fromarray(image) for image in row_images[: len(heads)]]
        titles = [", ".join([name, *head]) for head in heads]
        pictures = [PagePicture(title, png_of(image)) for title, image in zip(titles, first_images)]
        strips.append(Strip(name, pictures))
        speed = value_of(row, "speed_up")
        grid_rows.append((f"{name}\n{speed:.1f}x", first_images))

    # a browser would smooth the pixels of small images
    is_small = images[0].shape[2] < MOST_WIDTH
    files = {"report.html": html_page(report, [*plots, *of_drafts], strips, is_small).encode()}
    for name, pictures in (("speed_quality.png", plots), ("acceptance.png", of_drafts)):
        if pictures:
            files[name] = png_of(beside([picture.png for picture in pictures]))
        else:
            (out / name).unlink(missing_ok=True)  # of an earlier report
    files["comparison.png"] = png_of(seed_grid(grid_rows, ["\n".join(head) for head in heads]))
    worst = _worst_images(report, images)
    if worst is None:
        (out / "worst.png").unlink(missing_ok=True)  # of an earlier report
    else:
        files["worst.png"] = png_of(worst)
    files["comparison.md"] = markdown(report).encode()
    files["comparison.csv"] = csv_table(report).encode()
    for name, content in files.items():
        write_bytes(out / name, content)
    write_json(out / "comparison.json", report)
    return [*files, "comparison.json"]


def _worst_images(report: dict, images: Sequence[np.ndarray]) -> Image.Image | None:
    """The images that differ most from baseline sampling of the same noise, below those; None if no row has any."""
    names = [row["name"] for row in report["rows"]]
    subjects = in_turn(report["labels"], report["images"])
    blocks = []
    for row, own in zip(report["rows"], images):
        worst = row.get("worst_images") or []
        if not worst:
            continue
        chosen = [each["image"] for each in worst]
        heads = [f"image {each['image']}\n{subjects[each['image']]}\n{each['pixel_difference']:.1f}" for each in worst]
        base = images[names.index(row["paired_baseline"])]
        pairs = ((row["paired_baseline"], base), (row["name"], own))
        grid_rows = [(name, [Image.fromarray(each[i]) for i in chosen]) for name, each in pairs]
        blocks.append(seed_grid(grid_rows, heads))
    return stacked(blocks) if blocks else None


def _heads(report: dict) -> list[list[str]]:
    """The class or prompt of each of the first images, and its seed unless rows have their own."""
    subjects = report["labels"]
    noun = "" if are_texts(subjects) else "class "
    heads = []
    for i, subject in enumerate(in_turn(subjects, min(report["images"], PAGE_COLUMNS))):
        head = [f"{noun}{subject}"]
        if not own_seeds(report):
            head.append(f"seed {report['first_seed'] + i}")
        heads.append(head)
    return heads


def _panels(report: dict) -> list[Panel]:
    """Quality against speed-up and, for VQ models, tokens per forward pass, which do not depend on the machine."""
    qualities = {
        "accuracy": "fraction recognised by the classifier",
        "fid": f"{titled('FID', report['space'])} of {report['images']} images, lower is better",
        "clip_score": "CLIP score",
    }
    speeds = {
        "speed_up": f"speed-up over {report['baseline']}",
        "step_compression": "tokens per forward pass of the target",
    }
    # a panel for each pair that some row has both values of
    seconds = {row["name"]: row["seconds"] for row in report["rows"]}
    panels = []
    for quality, quality_title in qualities.items():
        for speed, speed_title in speeds.items():
            rows = [row for row in report["rows"] if row[quality] is not None and row[speed] is not None]
            points = [_point(row, speed, quality, seconds) for row in rows]
            if points:
                panels.append(Panel(speed_title, quality_title, points))
    return panels


MOST_CURVES = 6  # in a plot that has one for each row
BINS = 32  # of the generation order


def acceptance_curves(report: dict) -> list[Curves]:
    """The acceptance of drafts: by a setting that the rows sweep, along the generation order, and by round.

    The curves by round are the shares of the target's forward passes, and of the tokens that they save, by the number
    of tokens that a pass commits.
    """
    panels = []
    for setting, rows in _sweeps(report).items():
        for key, title in (("alpha", "acceptance rate"), ("resample_tries", "candidates per rejected draft")):
            lines = {}
            for name, own in rows.items():
                points = [(x, row[key]) for x, row in own if row[key] is not None]
                if len(points) > 1:
                    lines[name] = [x for x, _ in points], [y for _, y in points]
            if lines:
                panels.append(Curves(setting, title, lines))
    by_rank = {row["name"]: _along(row["by_rank"]) for row in report["rows"] if row.get("by_rank")}
    if 0 < len(by_rank) <= MOST_CURVES:
        panels.append(Curves("index of the token in the generation order", "acceptance rate", by_rank))
    rounds = {}
    for row in report["rows"]:
        # without drafts every round commits one token
        if set(row.get("committed") or {}) - {"1"}:
            rounds[row["name"]] = sorted((int(tokens), number) for tokens, number in row["committed"].items())
    if 0 < len(rounds) <= MOST_CURVES:
        titles = ("share of the forward passes", "share of the tokens that are saved")
        for title, first in zip(titles, (0, 1)):
            shares = {name: _shares(own, first) for name, own in rounds.items()}
            panels.append(Curves("tokens committed by a forward pass", title, shares))
    return panels


def _sweeps(report: dict) -> dict[str, dict[str, list[tuple[float, dict]]]]:
    """The rows by the setting that their names end in, by the rest of their names: (value, row), rising."""
    found: dict[str, dict[str, list[tuple[float, dict]]]] = {}
    for row in report["rows"]:
        label, line = _label(row)
        setting, _, value = label.partition("=")
        is_number = re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", value)
        if label != line and is_number and setting not in OWN_RUN:
            found.setdefault(setting, {}).setdefault(line, []).append((float(value), row))
    for lines in found.values():
        for own in lines.values():
            own.sort(key=lambda pair: pair[0])
    return found


def _along(by_rank: Sequence[Sequence[int]]) -> tuple[list[float], list[float]]:
    """The acceptance rate by index in the generation order, in bins: the mean index, and accepted over verified."""
    x, y = [], []
    for bin_ in np.array_split(np.arange(len(by_rank[0])), BINS):
        verified, accepted = np.array(by_rank)[:, bin_].sum(1).tolist()
        if verified:
            x.append(float(bin_.mean()))
            y.append(accepted / verified)
    return x, y


def _shares(rounds: Sequence[tuple[int, int]], first: int) -> tuple[list[int], list[float]]:
    """The share of rounds by their number of tokens, each weighted with the tokens after its `first`, or 1 if 0."""
    tokens = [each for each, _ in rounds]
    weights = [number * (each - first if first else 1) for each, number in rounds]
    return tokens, [weight / sum(weights) for weight in weights]


def _point(row: dict, speed: str, quality: str, seconds: Mapping[str, list[float]]) -> PlotPoint:
    """A row's point; `seconds`: of the turns of each row, by name."""
    label, line = _label(row)
    base_seconds = seconds[row["speed_baseline"]]
    speed_range = None
    if speed == "speed_up":
        # the middle half of the turns: the extremes say more about the machine than about the method
        ratios = [base / own for base, own in zip(base_seconds, row["seconds"])]
        speed_range = tuple(np.percentile(ratios, [25, 75]).tolist())
    return PlotPoint(
        label,
        value_of(row, speed),
        row[quality],
        line,
        speed_range,
        quality_range=row[f"{quality}_ci95"],
        guarantee=row["guarantee"],
        on_front=quality == "fid" and row.get("front", False),
    )


def _label(row: dict) -> tuple[str, str]:
    """A point's label and its line: for "lantern++:optimal=true:k=10" the last setting and the rest; else the name."""
    # configurations that differ in the last setting only are one line: a sweep
    name = row["name"]
    line, colon, last = name.rpartition(":")
    method, _, _ = line.partition(":")
    if colon and method == row["method"] and not last.startswith("seed="):
        return last, line
    return name, name


def html_page(
    report: dict, plots: Sequence[PagePicture] = (), strips: Sequence[Strip] = (), is_small: bool = False
) -> str:
    """A page in one file: table, images, settings, what ran, and how to read it (report.html.j2).

    `is_small`: images are enlarged, with visible pixels.
    """
    # names and prompts are escaped; a name that the template misspells is an error, not an empty text
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["json"] = json.dumps
    given = {row["guarantee"] for row in report["rows"]}
    search = report.get("tune")
    return environment.get_template("report.html.j2").render(
        report=report,
        command="cspd tune" if search else "cspd compare",
        search=search,
        front=front_table(report) if search else None,
        plots=plots,
        strips=strips,
        small=is_small,
        most_width=MOST_WIDTH,
        columns=columns(report),
        of_texts=are_texts(report["labels"]),
        cell=cell,
        notes=notes(report),
        model_line=model_line,
        own_seeds=own_seeds(report),
        length_tests=length_tests(report),
        guarantees={name: meaning for name, meaning in GUARANTEES.items() if name in given},
    )
