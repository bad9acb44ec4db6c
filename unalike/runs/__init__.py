"""Runs: prepared, carried out, saved, resumed and compared."""
