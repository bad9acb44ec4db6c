"""Charts as inline SVG, drawn by hand: small, sharp in print, readable without a script and by screen readers.

Colours live in the style sheet (classes ``s0`` … ``s7`` for runs, ``q0`` … ``q6`` for low to high scores), so that one
chart serves light and dark. A run keeps its colour and its marker in every chart. Lengths are SVG units; a chart is
``WIDTH`` units wide and scales with its column, so margins leave room for the larger letters of a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unalike.studio.report.markup import Html, join, tag

WIDTH = 480.0
MAP_WIDTH, MAP_HEIGHT = 300.0, 250.0  # maps stand side by side
COLOURS = 8
STEPS = 7  # of the scale of scores
_LETTER = 8.0  # width of a letter, generously
_MOST_POINTS = 300  # of one line: more cannot be told apart

Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One run's line: (x, y) points, and whether its points are few enough to be marked."""

    run: int
    label: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] = ()  # of each point, drawn as a band; none: no band
    shape: str | None = None  # None: the run's own; several lines of one run need several


@dataclass(frozen=True)
class Across:
    """What runs along the bottom of a line chart."""

    title: str
    form: Format
    ticks: Sequence[float] | None = None  # where something was measured; None: round numbers
    log: bool = False
    whole: bool = False  # of round numbers, only those without fractions


@dataclass(frozen=True)
class Dot:
    """One client: where it is, how large, and what is said about it."""

    x: float
    y: float
    tip: str
    radius: float = 4.0
    shade: int | None = None  # step of the scale of scores; None: not served
    shape: str = "circle"


@dataclass(frozen=True)
class Strip:
    """One run's scores over the clients of a group."""

    run: int
    label: str
    says: str
    scores: Sequence[tuple[float, str]]  # score and what is said about the client; none: not served
    mean: float | None
    p10: float | None


def colour(run: int) -> str:
    """The class that carries a run's colour."""
    return f"s{run % COLOURS}"


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that span low..high."""
    largest = max(abs(low), abs(high))
    if not high - low > max(1e-9 * largest, 1e-100):  # as good as equal
        margin = 0.1 * largest if largest > 1e-100 else 1.0
        low, high = low - margin, high + margin
    rough = (high - low) / count
    digits = math.floor(math.log10(rough))
    power = 10.0**digits
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - min(digits, 0)) for i in range(first, last + 1)]


def line_chart(
    series: Sequence[Series], ticks: Sequence[float], *, title: str, form: Format, across: Across | None = None
) -> Html:
    """Lines over rounds (or what ``across`` says), each named at its end."""
    height = 270.0
    across = across or Across("round", lambda x: f"{x:,.0f}", whole=True)
    drawn = [line for line in series if line.points]
    xs = [x for line in drawn for x, _ in line.points]
    left = 12 + _LETTER * max(len(form(tick)) for tick in ticks)
    right = 18 + _LETTER * max(len(_clipped(line.label)) for line in drawn)
    top, bottom = 14.0, 46.0
    along = math.log if across.log else float
    x_low, x_high = along(min(xs)), along(max(xs))
    if x_low == x_high:
        x_high += max(1.0, abs(x_high))  # adding 1 changes nothing of a number above 1e16

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (along(x) - x_low) / (x_high - x_low) * (WIDTH - left - right),
            top + (ticks[-1] - y) / (ticks[-1] - ticks[0]) * (height - top - bottom),
        )

    parts = [_horizontal_grid(ticks, lambda y: at(min(xs), y)[1], left, WIDTH - right, form)]
    base = at(min(xs), ticks[0])[1]
    for tick in _bottom_ticks(across, min(xs), max(xs), lambda x: at(x, 0)[0]):
        parts.append(_words(at(tick, 0)[0], base + 20, across.form(tick), "tick", "middle"))
    parts.append(_words((left + WIDTH - right) / 2, height - 6, across.title, "axis", "middle"))
    ends = _spread([at(*line.points[-1])[1] for line in drawn], 16, top + 4, height - bottom)
    for line, end in zip(drawn, ends, strict=True):
        places = [at(x, y) for x, y in _thinned(line.points)]
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        marks = []
        stride = math.ceil(len(line.points) / 50)
        for i, (x, y) in list(enumerate(line.points))[::stride]:
            spread = f" ± {form(line.errors[i])}" if line.errors else ""
            tip = f"{line.label}\n{across.title} {across.form(x)}: {form(y)}{spread}"
            kind = "mark" if len(line.points) <= 25 else "mark unseen"  # many marks would hide the line
            marks.append(_marker(line.shape or shape_of(line.run), *at(x, y), 2.6, kind, tip))
        dashed = "line dashed" if (line.run // COLOURS) % 2 else "line"
        parts.append(
            tag(
                "g",
                _band(line, at, ticks),
                tag("path", d=path, class_=dashed),
                *marks,
                tag(
                    "path",
                    d=f"M{places[-1][0] + 4:.1f} {places[-1][1]:.1f} L{WIDTH - right + 8:.1f} {end:.1f}",
                    class_="lead",
                ),
                _words(WIDTH - right + 11, end + 4.5, _clipped(line.label), "name", "start"),
                class_=f"run {colour(line.run)}",
                data_run=line.run,
            )
        )
    return _svg(parts, height, title)


def _bottom_ticks(across: Across, low: float, high: float, at: Callable[[float], float]) -> list[float]:
    """Where the bottom of a line chart has numbers: inside of it, and none on top of another."""
    if across.ticks is None:
        within = [tick for tick in nice_ticks(low, high) if low <= tick <= high]
        return [tick for tick in within if not across.whole or tick == int(tick)]
    shown: list[float] = []
    for tick in across.ticks:
        width = _LETTER * (len(across.form(tick)) + 1)
        if low <= tick <= high and (not shown or at(tick) - at(shown[-1]) >= width):
            shown.append(tick)
    return shown


def _band(line: Series, at: Callable[[float, float], tuple[float, float]], ticks: Sequence[float]) -> Html | None:
    """A standard error to both sides of a line, inside of the chart."""
    if not line.errors:
        return None
    both = list(zip(line.points, line.errors, strict=True))
    upper = [at(x, min(y + error, ticks[-1])) for (x, y), error in both]
    lower = [at(x, max(y - error, ticks[0])) for (x, y), error in reversed(both)]
    return tag("path", d="M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in [*upper, *lower]) + " Z", class_="band")


def strip_chart(strips: Sequence[Strip], ticks: Sequence[float], *, title: str, x_title: str, form: Format) -> Html:
    """One row for each run: a dot for each client (for very many: a histogram), the mean and the 10th percentile."""
    row, left, right, top, bottom = 78.0, 16.0, 18.0, 6.0, 46.0
    height = top + row * len(strips) + bottom

    def at(score: float) -> float:
        return left + (score - ticks[0]) / (ticks[-1] - ticks[0]) * (WIDTH - left - right)

    base = height - bottom
    parts = [tag("path", d=f"M{at(tick):.1f} {top} V{base}", class_="grid") for tick in ticks]
    parts += [_words(at(tick), base + 18, form(tick), "tick", "middle") for tick in ticks]
    parts.append(_words((left + WIDTH - right) / 2, height - 6, x_title, "axis", "middle"))
    counts = [_counted(strip, ticks) for strip in strips]
    fits = max(map(max, counts)) <= 12 and max(len(strip.scores) for strip in strips) <= 400
    for i, strip in enumerate(strips):
        middle = top + row * i + 49
        if fits:
            inside = _swarm(strip, at, middle, row - 34)
        else:
            inside = _bars(strip, counts[i], max(map(max, counts)), at, middle + 20, row - 34, ticks, form)
        marks = [
            tag("path", d=f"M{at(score):.1f} {middle - 20:.1f} v40", class_=cls)
            for score, cls in ((strip.mean, "mean"), (strip.p10, "decile"))
            if score is not None
        ]
        name = tag(
            "text",
            tag("tspan", _clipped(strip.label, 24), class_="name"),
            tag("tspan", strip.says, class_="quiet", dx=8),
            x=left - 4,
            y=middle - 28,
        )
        parts.append(tag("g", name, *inside, *marks, class_=f"run {colour(strip.run)}", data_run=strip.run))
    return _svg(parts, height, title)


def scatter(dots: Sequence[Dot], words: Sequence[tuple[float, float, str]], *, title: str) -> Html:
    """A map of clients without scales (its axes have no unit); ``words`` are written behind the dots."""
    left, right = min(dot.x for dot in dots), max(dot.x for dot in dots)
    low, high = min(dot.y for dot in dots), max(dot.y for dot in dots)
    margin = 16.0
    room = ((MAP_WIDTH - 2 * margin) / max(right - left, 1e-9), (MAP_HEIGHT - 2 * margin) / max(high - low, 1e-9))
    unit = min(room)  # one for both directions, so that distances are true

    def at(x: float, y: float) -> tuple[float, float]:
        return MAP_WIDTH / 2 + (x - (left + right) / 2) * unit, MAP_HEIGHT / 2 - (y - (low + high) / 2) * unit

    parts = [_marker(dot.shape, *at(dot.x, dot.y), dot.radius, _shade(dot.shade), dot.tip) for dot in dots]
    taken: list[tuple[float, float]] = []
    for x, y, word in words:
        px, py = at(x, y)
        while any(abs(px - tx) < 14 and abs(py - ty) < 14 for tx, ty in taken):
            py += 5  # below the word that is there already
        taken.append((px, py))
        parts.append(_words(px, py + 4.5, _clipped(word, 12), "class", "middle"))
    return _svg(parts, MAP_HEIGHT, title, MAP_WIDTH)


def key_mark(shape: str, cls: str) -> Html:
    """A small mark for a legend."""
    return tag("svg", _marker(shape, 6, 6, 4.6, cls, None), viewBox="0 0 12 12", class_="key", aria_hidden="true")


def shape_of(run: int) -> str:
    """The marker of a run, so that colour is never the only difference."""
    return _SHAPES[run % len(_SHAPES)]


_SHAPES = ("circle", "square", "triangle", "diamond")


def _shade(step: int | None) -> str:
    return "dot none" if step is None else f"dot q{step}"


def _svg(parts: Sequence[Html], height: float, title: str, width: float = WIDTH) -> Html:
    return tag("svg", *parts, viewBox=f"0 0 {width:.0f} {height:.0f}", class_="plot", role="img", aria_label=title)


def _words(x: float, y: float, words: str, cls: str, anchor: str) -> Html:
    return tag("text", words, x=x, y=y, class_=cls, text_anchor=anchor)


def _clipped(label: str, most: int = 17) -> str:
    return label if len(label) <= most else label[: most - 1] + "…"


def _marker(shape: str, x: float, y: float, r: float, cls: str, tip: str | None) -> Html:
    says = None if tip is None else tag("title", tip)
    if shape == "circle":
        return tag("circle", says, cx=x, cy=y, r=r, class_=cls)
    if shape == "square":
        d = f"M{x - r * 0.9:.1f} {y - r * 0.9:.1f} h{r * 1.8:.1f} v{r * 1.8:.1f} h{-r * 1.8:.1f} Z"
    elif shape == "triangle":
        d = f"M{x:.1f} {y - r * 1.2:.1f} l{r * 1.15:.1f} {r * 2.1:.1f} h{-r * 2.3:.1f} Z"
    else:
        r *= 1.3
        d = f"M{x:.1f} {y - r:.1f} l{r:.1f} {r:.1f} l{-r:.1f} {r:.1f} l{-r:.1f} {-r:.1f} Z"
    return tag("path", says, d=d, class_=cls)


def _horizontal_grid(
    ticks: Sequence[float], at: Format | Callable[[float], float], left: float, right: float, form: Format
) -> Html:
    parts = []
    for tick in ticks:
        y = float(at(tick))
        parts.append(tag("path", d=f"M{left:.1f} {y:.1f} H{right:.1f}", class_="grid"))
        parts.append(_words(left - 7, y + 4.5, form(tick), "tick", "end"))
    return join(parts)


def _thinned(points: Sequence[tuple[float, float]], most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """At most about ``most`` points, evenly, the first and the last always among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions near the wanted ones with at least ``gap`` between them, so that labels do not cover each other."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = list(wanted)
    for before, i in zip([None, *order], order, strict=False):
        least = low if before is None else placed[before] + gap
        placed[i] = max(wanted[i], least)
    for after, i in zip([None, *reversed(order)], reversed(order), strict=False):
        most = high if after is None else placed[after] - gap
        placed[i] = min(placed[i], most)
    return placed


def _swarm(strip: Strip, at: Callable[[float], float], middle: float, room: float) -> list[Html]:
    """Dots side by side where scores are equal, packed closer if they would leave the row."""
    radius = 3.4 if len(strip.scores) <= 120 else 2.4
    columns: dict[int, list[tuple[float, str]]] = {}
    for score, tip in sorted(strip.scores):
        columns.setdefault(round(at(score) / (2 * radius)), []).append((score, tip))
    tallest = max(map(len, columns.values()), default=1)
    pitch = min(2 * radius + 0.4, (room - 2 * radius) / max(tallest - 1, 1))
    dots = []
    for column in columns.values():
        for i, (score, tip) in enumerate(column):
            offset = (i + 1) // 2 * (1 if i % 2 else -1)  # middle, below, above, further below, ...
            y = middle + (offset + (0.0 if len(column) % 2 else -0.5)) * pitch
            dots.append(tag("circle", tag("title", tip), cx=at(score), cy=y, r=radius, class_="client"))
    return dots


_BINS = 40


def _counted(strip: Strip, ticks: Sequence[float]) -> list[int]:
    """Clients in each fortieth of the scale."""
    counts = [0] * _BINS
    for score, _ in strip.scores:
        counts[min(max(int((score - ticks[0]) / (ticks[-1] - ticks[0]) * _BINS), 0), _BINS - 1)] += 1
    return counts


def _bars(
    strip: Strip,
    counts: Sequence[int],
    most: int,
    at: Callable[[float], float],
    base: float,
    room: float,
    ticks: Sequence[float],
    form: Format,
) -> list[Html]:
    width = (ticks[-1] - ticks[0]) / _BINS
    bars = [tag("path", d=f"M{at(ticks[0]):.1f} {base:.1f} H{at(ticks[-1]):.1f}", class_="grid")]
    for i, count in enumerate(counts):
        if count:
            low, high = ticks[0] + i * width, ticks[0] + (i + 1) * width
            tall = max(room * count / most, 1.5)
            says = tag(
                "title", f"{strip.label}\n{form(low)} to {form(high)}: {count:,} client{'' if count == 1 else 's'}"
            )
            span = at(high) - at(low) - 1
            bars.append(tag("rect", says, x=at(low), y=base - tall, width=span, height=tall, class_="client"))
    return bars
