"""What goes wrong through no fault of the program: told in a sentence, with what to do, and without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can put right; the message says what was expected, what came and what to do."""


class Interrupted(Exception):
    """The run was asked to stop and has done so after a whole round; it can go on from its checkpoint."""

    def __init__(self, round: int, rounds: int, folder: str | None) -> None:
        resume = "" if folder is None else f" Go on with: unalike resume {folder}"
        super().__init__(f"stopped after round {round} of {rounds}.{resume}")
        self.round = round
