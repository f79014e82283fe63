"""What is trained for: one objective is one file, with its collator, its loss and its metrics."""
