"""Captions in the form that LlamaGen's models know: plain words in lower case, as of web pages' captions.

The rules are those of DeepFloyd IF, which LlamaGen's authors apply to every caption, in training and in sampling. They
are what they are: a model was trained on what they leave, down to their oddities. Every rule takes time in proportion
to the caption's length, however odd the caption is.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from urllib.parse import unquote_plus

HOST = r"[a-zA-Z0-9.\-]"
DOMAIN = rf"{HOST}+[.](?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
SUFFIX = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
DASHES = "-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
EASTERN_DASHES = "\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
DECORATION = re.escape("#®•©™&@·º½¾¿¡§~)(][}{|\\/*")
MOST_HYPHENS = 3  # with more, hyphens and underscores are taken for spaces

Rules = Sequence[tuple[str, str]]
ADDRESSES: Rules = [  # a word without a domain is put back whole: nothing after its first letter is tried again
    (rf"\b(?:{scheme}:(?:/{{1,3}}|[a-zA-Z0-9%])|{DOMAIN}|((?:(?!\b{scheme}:){HOST})+))", r"\1")
    for scheme in ("https?", "www")
]
CHARACTERS: Rules = [
    (r"@\w+\b", ""),  # names of accounts
    (r"[\u31c0-\u9fff]+", ""),  # Chinese and Japanese
    (f"[{DASHES}{EASTERN_DASHES}]+", "-"),
    ("[`´«»“”¨]", '"'),
    ("[‘’]", "'"),
    ("&quot;?", ""),
    ("&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # addresses of computers
    (r"\d:\d\d\s+$", ""),  # numbers: of articles, of lists, and long ones
    (r"\\n", " "),
    (r"#\d{1,3}\b", ""),
    (r"#\d{5,}\b", ""),
    (r"\b\d{6,}\b", ""),
    (rf"(?<!\S)\S+\.{SUFFIX}", ""),  # names of files
    ("[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (f"[{DECORATION}]+", " "),
    (r"(?<!\s)\s+\.\s+", " "),
]
WORDS: Rules = [
    (r"\b[a-zA-Z]{1,3}\d{3,15}\b", ""),  # numbers of products
    (r"\b[a-zA-Z]+\d+[a-zA-Z]+\b", ""),
    (r"\b\d+[a-zA-Z]+\d+\b", ""),
    (r"(worldwide\s+)?(free\s+)?shipping", ""),  # what shops and pages say around a caption
    (r"(free\s)?download(\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{SUFFIX}(\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d[a-zA-Z\d]*\b", " "),
    (r"\b\d+(?:\.\d*)?[xх×]\d+(?:\.\d*)?\b", ""),  # sizes
    (r"\b\s+:\s+", ": "),
    (r"(\D[,./])\b", r"\1 "),
    (r"\s+", " "),
    (r"^[\"']([\w\W]+)[\"']$", r"\1"),  # what stands at the ends
    (r"^['_,\-:;]", ""),
    (r"['_,\-:+]$", ""),
    (r"^\.\S+$", ""),
]


def cleaned(caption: str) -> str:
    """A caption by the rules, twice, as the authors apply them."""
    return _cleaned_once(_cleaned_once(caption))


def _cleaned_once(caption: str) -> str:
    import ftfy

    caption = unquote_plus(caption).strip().lower().replace("<person>", "person")
    caption = _without_tags(_by(ADDRESSES, caption))
    caption = _by(CHARACTERS, caption)
    if len(re.findall("[-_]", caption)) > MOST_HYPHENS:
        caption = re.sub("[-_]", " ", caption)
    caption = html.unescape(html.unescape(ftfy.fix_text(caption))).strip()
    return _by(WORDS, caption).strip()


def _by(rules: Rules, caption: str) -> str:
    for pattern, replacement in rules:
        caption = re.sub(pattern, replacement, caption)
    return caption


def _without_tags(caption: str) -> str:
    """The text of a piece of HTML."""
    if not re.search("[<&]", caption):
        return caption
    from bs4 import BeautifulSoup
    from bs4.builder import ParserRejectedMarkup

    try:
        return BeautifulSoup(caption, features="html.parser").text
    except ParserRejectedMarkup:  # some Python versions cannot parse "<!["
        return caption
