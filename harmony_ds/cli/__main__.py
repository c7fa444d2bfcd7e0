"""`python -m harmony_ds.cli`."""

from harmony_ds.cli import main

main()
