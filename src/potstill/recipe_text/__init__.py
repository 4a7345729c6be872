"""A recipe as text: YAML without its surprises, and references from one key to another."""
