"""The student's own text: engines that write it, and the buffer that keeps it."""
