"""`potstill preview`: what a recipe makes of its records, as the student and as each teacher reads them."""
