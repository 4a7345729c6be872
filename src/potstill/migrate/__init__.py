"""Other systems' configurations as recipes, and their files as a cache."""
