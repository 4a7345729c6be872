"""How the work is spread over processes."""
