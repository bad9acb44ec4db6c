"""A newcomer and a finished run: its file, its model, and what it has spent."""
