"""`python -m potstill`."""

from potstill.cli.main import main

main()
