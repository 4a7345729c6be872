"""`potstill generate`: a teacher's or the student's answers to a data set's prompts, checked and kept as a data set."""
