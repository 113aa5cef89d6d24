"""Files: what processes of one machine share by files and memory. Imports `messages`."""
