"""``unalike estimate``: its commands, and what they print."""
