"""Source: the files and lines that the script is made of. Imports no other room."""
