"""One question a folder: a script, its data, and what it found."""
