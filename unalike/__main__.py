"""``python -m unalike`` is the same as ``unalike``."""

from unalike.commands.main import main

if __name__ == "__main__":
    main()
