"""Data sets by name: where each lies, how it is read, and what it holds."""
