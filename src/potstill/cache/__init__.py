"""A teacher's signal on disk."""
