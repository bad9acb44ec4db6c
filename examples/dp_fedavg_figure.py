"""Draw accuracy against ε from a run folder of the recipe dp-fedavg-mnist: python dp_fedavg_figure.py FOLDER SVG."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from unalike import Result

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 520, 320, 60, 50, 40


def results(folder: Path) -> list[tuple[float, float]]:
    """(ε, accuracy on seen clients) of every run in the folder; without privacy ε is infinite."""
    found = []
    for file in sorted(folder.glob("*/result.json")):
        result = Result.load(file.parent)
        epsilon = result.privacy.epsilon
        assert result.accuracy.seen is not None, f"{file.parent} was handed on without its scores"
        found.append((math.inf if epsilon is None else epsilon, result.accuracy.seen.mean))
    return sorted(found)


def figure(points: list[tuple[float, float]]) -> str:
    """The picture: a dot for each private run, a line at the accuracy without privacy."""
    private = [point for point in points if math.isfinite(point[0])]
    open_run = [accuracy for epsilon, accuracy in points if math.isinf(epsilon)]
    low = math.floor(20 * min(accuracy for _, accuracy in points)) / 20 - 0.05
    most = max(epsilon for epsilon, _ in private)

    def x(epsilon: float) -> float:
        return LEFT + (WIDTH - LEFT - 30) * epsilon / (1.1 * most)

    def y(accuracy: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (accuracy - low) / (1.0 - low)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    step = 0.05 if 1.0 - low <= 0.3 else 0.1
    for i in range(round((1.0 - low) / step) + 1):
        tick = low + i * step
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - 30}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{100 * tick:.0f}%</text>')
    if open_run:
        parts.append(f'<path d="M{LEFT} {y(open_run[0]):.1f}H{WIDTH - 30}" stroke="#b35900" stroke-dasharray="6 4"/>')
        words = f"without privacy: {100 * open_run[0]:.1f}%"
        parts.append(f'<text x="{LEFT + 8}" y="{y(open_run[0]) - 7:.1f}" fill="#b35900">{words}</text>')
    line = " ".join(f"{x(e):.1f},{y(a):.1f}" for e, a in private)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#2a5db0" stroke-width="2"/>')
    for epsilon, accuracy in private:
        parts.append(f'<circle cx="{x(epsilon):.1f}" cy="{y(accuracy):.1f}" r="5" fill="#2a5db0"/>')
        label = f"{100 * accuracy:.1f}%"
        parts.append(f'<text x="{x(epsilon):.1f}" y="{y(accuracy) + 22:.1f}" text-anchor="middle">{label}</text>')
        parts.append(f'<text x="{x(epsilon):.1f}" y="{HEIGHT - 30}" text-anchor="middle">{epsilon:.0f}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">ε of one client</text>')
    parts.append(f'<text x="{LEFT}" y="22">DP-FedAvg on MNIST: accuracy on seen clients</text>')
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>' + "".join(parts) + "</svg>\n"


def main(runs: str, svg: str) -> None:
    Path(svg).write_text(figure(results(Path(runs))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:3])
