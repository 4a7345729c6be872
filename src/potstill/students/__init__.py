"""What a run makes of the model that learns: which of it learns, and what else it learns by."""
