"""Figures: Altair charts, drawn by vl-convert without a browser or a network; for the report, the screen and papers."""
