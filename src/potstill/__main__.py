"""`python -m potstill`."""

from potstill.cli import main

main()
