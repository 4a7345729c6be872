"""Other systems' files as potstill's own."""
