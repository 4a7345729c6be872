"""Where the teacher's signal comes from."""
