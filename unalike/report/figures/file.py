"""A chart as a file or as a part of a page."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any, Protocol

from unalike.core.disk import write_whole
from unalike.report.figures.theme import CONFIG, LIGHT
from unalike.runs.errors import FLAG, UserError


class Figure(Protocol):
    """A chart of Altair, of any kind."""

    def to_dict(self, validate: bool = ...) -> dict[str, Any]: ...


ENDINGS = (".html", ".pdf", ".png", ".svg")
_PAPER = {**CONFIG, "background": "white"}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>body {{ margin: 2rem; background: white }} svg {{ max-width: 100%; height: auto }}</style>
</head><body>{svg}</body></html>
"""
_NAMES = {value: name for name, value in LIGHT.items()}
_COLOUR = re.compile(r'(fill|stroke)="(#[0-9a-f]{6})"')
_TIP = re.compile(r'aria-label=("[^"]*") role="graphics-symbol" aria-roledescription="[^"]*"')
_SIZE = re.compile(r'^<svg [^>]*?class="marks" width="[\d.]+" height="[\d.]+" (viewBox="[^"]*")>')
_USELESS = re.compile(
    r'<path class="foreground"[^>]*/>| aria-hidden="true"| role="graphics-object"| aria-roledescription="[^"]*"'
    r'| font-family="[^"]*"'
)


def check_ending(path: Path | None) -> None:
    """Refuse, before any work is done, a file that no figure can be written to."""
    if path is not None and path.suffix.lower() not in ENDINGS:
        known = f"{', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        raise UserError(f"a figure's file ends in {known}; {path} does not: choose another name{FLAG}", "plot")


def save(chart: Figure, path: Path) -> None:
    """Write a chart as SVG, PDF, PNG or an HTML page that needs no network, by the file's ending."""
    check_ending(path)
    import vl_convert

    spec, ending = chart.to_dict(), path.suffix.lower()
    path.parent.mkdir(parents=True, exist_ok=True)
    if ending == ".pdf":
        return write_whole(path, vl_convert.vegalite_to_pdf(spec, config=_PAPER, allowed_base_urls=[]))
    if ending == ".png":
        return write_whole(path, vl_convert.vegalite_to_png(spec, config=_PAPER, scale=2, allowed_base_urls=[]))
    svg = vl_convert.vegalite_to_svg(spec, config=_PAPER, allowed_base_urls=[])
    if ending == ".html":
        svg = _PAGE.format(title=html.escape(str(spec.get("title", path.stem))), svg=svg)
    write_whole(path, svg.encode())


def inline(chart: Figure, title: str) -> str:
    """A chart as SVG for a page that has the theme's colours as CSS variables and shows ``data-tip`` as a tooltip."""
    import vl_convert

    spec = chart.to_dict(validate=False)  # a third of the time, to find mistakes that none of our charts has
    svg = vl_convert.vegalite_to_svg(spec, config=CONFIG, allowed_base_urls=[])
    begin = rf'<svg class="plot" role="img" aria-label="{html.escape(title)}" \1>'
    return _COLOUR.sub(_variable, _USELESS.sub("", _SIZE.sub(begin, _TIP.sub(r"data-tip=\1", svg))))


def _variable(found: re.Match[str]) -> str:
    attribute, value = found.groups()
    return f'{attribute}="var(--{_NAMES[value]})"' if value in _NAMES else found.group()
