"""What the papers look at beside accuracy, for a finished run."""
