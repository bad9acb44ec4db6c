"""Markup that is safe by default: text is escaped unless it was made by ``tag`` itself."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = {"br", "link", "meta"}


class Html(str):
    """Text that is markup already; everything else is escaped when it becomes part of a page."""


Attribute = str | float | bool | None


def tag(name: str, /, *children: str | None, **attributes: Attribute) -> Html:
    """One element. ``class_`` and ``data_run`` become ``class`` and ``data-run``; None leaves an attribute out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str | None], between: str = "") -> Html:
    """Parts one after the other, each escaped unless it is markup."""
    return Html(_text(between).join(_text(part) for part in parts if part is not None))


def _text(part: str) -> str:
    return part if isinstance(part, Html) else html.escape(part)


def _value(value: Attribute) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")  # a tenth of a unit is finer than a screen shows
    return html.escape("" if value is True else str(value))
