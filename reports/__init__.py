"""What is concluded: read a run's files, check them, compare, decide, draw, render."""
