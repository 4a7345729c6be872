"""How good a student is, and how close to its teacher."""
