"""Attacks on the code that would run: does the privacy hold that a run claims?"""
