"""Loads data that papers use and that cannot be had here.

Whoever has it loads it in Python: ``unalike.data.load(stack_overflow(seed=0))``.
"""
