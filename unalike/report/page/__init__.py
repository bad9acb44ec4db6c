"""The page: what a run folder holds, as one HTML file."""
