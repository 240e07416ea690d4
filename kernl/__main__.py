"""`python -m kernl`, the same as the command `kernl`."""

from kernl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
