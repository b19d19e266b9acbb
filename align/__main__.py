"""``python -m align``."""

from align.cli import main

if __name__ == "__main__":
    main()
