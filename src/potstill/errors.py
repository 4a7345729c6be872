"""What a user can put right. Imports nothing: `potstill --help` and a mistake in a recipe need no torch."""

from __future__ import annotations


class PotstillError(Exception):
    """Something the user can put right. The command line shows its one sentence and no traceback."""

    shared = False  # every rank of the run raises it
    at_once = False  # the process ends without waiting for its threads
