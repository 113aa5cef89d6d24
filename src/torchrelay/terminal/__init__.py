"""Terminal: tables, numbers and words of the command line. Imports nothing of ours."""
