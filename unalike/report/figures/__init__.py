"""Figures: Altair charts, drawn by vl-convert without a browser or a network; for the report, the screen and papers."""

from unalike.report.figures.file import save
from unalike.report.figures.training import Axis, Line, lines

__all__ = ["Axis", "Line", "lines", "save"]
