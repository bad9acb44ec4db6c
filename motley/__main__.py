"""``python -m motley`` is the same as ``motley``."""

from motley.cli import main

if __name__ == "__main__":
    main()
