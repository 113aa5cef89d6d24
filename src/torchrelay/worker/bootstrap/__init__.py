"""Bootstrap: the process starts, runs the script, and gives it its `Run`. Imports all other rooms."""
