"""What an optimizer step minimises: the student with its loss as one module, and what each token counts in it."""
