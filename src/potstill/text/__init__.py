"""Text and tokens: what a vocabulary stands for in bytes, how two of them line up, and how a chat becomes text."""
