"""Recipes: everything that decides a run, and the names by which people set it."""
