"""`potstill doctor`: everything that would go wrong later, now. One file for each family of checks, one table of them all."""
