"""The report of a run or a comparison: one HTML page that needs nothing else."""
