"""What `cspd evaluate` prints: its report as text, a line a number."""

from __future__ import annotations

from cspd.evaluation.shards import EXPLODED
from cspd.ran import model_line
from cspd.summary import measured_lines

Line = tuple[str, str, str]  # a title, a value, a note


def format_evaluation(report: dict) -> str:
    """The report as text, a line a number."""
    reference, sampling = report["reference"], report.get("sampling")
    against = f"against {reference['name']} ({reference['fingerprint'][:12]})" if reference else ""
    judged = f"{report['space']} space {against}" if report["space"] else report["missing"]["fid"]
    lines = [("images", f"{report['num']:,}", judged)]
    if report["space"]:
        lines += _quality_lines(report)
    lines += _clip_line(report)
    if report["largest_token"] is not None:
        exploded = f"{report['exploded']} of {report['num']:,} images exploded (a token beyond {EXPLODED:g})"
        lines.append(("largest token", f"{report['largest_token']:.2f}", exploded))
    if sampling:
        lines += _sampling_lines(sampling, report["settings"]["request"])
    lines += [(model["role"], "", model_line(model)) for model in report["ran"]["models"]]
    machine = report["ran"]["machine"]
    lines.append(("machine", "", f"{machine['device']}, threads: {machine['threads']}"))
    return "\n".join(f"{title:<18} {value:>10}  {note}".rstrip() for title, value, note in lines)


def _quality_lines(report: dict) -> list[Line]:
    """What the images' features and the classifier say."""
    spread = "" if report["inception_score_std"] is None else f"+- {report['inception_score_std']:.3f} over ten parts"
    recognised = "recognised as their class"
    if report["accuracy_ci95"] is not None:
        low, high = report["accuracy_ci95"]
        recognised += f", 95 % interval {low:.1%} to {high:.1%}"
    forms = (
        ("fid", ".3f", ""),
        ("inception_score", ".3f", spread),
        ("kid", ".5f", ""),
        ("precision", ".3f", ""),
        ("recall", ".3f", ""),
        ("accuracy", ".1%", recognised),
    )
    lines = []
    for name, form, note in forms:
        value = report[name]
        title = name.upper() if len(name) == 3 else name.replace("_", " ")
        lines.append((title, "-" if value is None else format(value, form), report["missing"].get(name, note)))
    return lines


def _sampling_lines(sampling: dict, request: dict) -> list[Line]:
    """How the images were made, and what they took."""
    start = request.get("first_timestep")
    chains = f", chains from timestep {start}" if start is not None else ""
    lines = [("method", request["method"], sampling["guarantee"] + chains)]
    if "step_compression" in sampling:
        lines.append(("codes per forward", f"{sampling['step_compression']:.2f}", ""))
    else:
        calls = f"{sampling['head_calls_per_image']:.0f} per image"
        lines.append(("head calls per token", f"{sampling['head_calls_per_token']:.1f}", calls))
    if sampling["bound_per_image"] > 0:
        bound = f"{min(sampling['bound_per_image'], 1):.3f}"
        lines.append(("TV bound", bound, "of an image's codes, from the target's (docs/bounds.md)"))
    lines += measured_lines(sampling)
    if sampling["images_made"]:
        made = f"{sampling['images_made']} images in {sampling['seconds']:.1f} s"
        made += f" by {sampling['processes']} processes" if sampling["processes"] > 1 else ""
        lines.append(("images/s", f"{sampling['images_per_second']:.2f}", made))
    else:
        lines.append(("images/s", "-", "all were there already"))
    return lines


def _clip_line(report: dict) -> list[Line]:
    """The CLIP score of images of texts."""
    missing = report["missing"].get("clip_score")
    if report["clip_score"] is None:
        return [("CLIP score", "-", missing)] if missing else []
    error, model = report["clip_score_error"], report["clip"]
    spread = "" if error is None else f"+- {error:.2f} (standard error), "
    return [("CLIP score", f"{report['clip_score']:.2f}", f"{spread}by {model['name']} ({model['fingerprint'][:12]})")]
