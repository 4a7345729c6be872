"""What a teacher says at each token, as arrays and as bytes: one class per kind."""
