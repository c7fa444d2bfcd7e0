"""`python -m harmony_ds.cli`."""

from harmony_ds.cli import main

if __name__ == "__main__":  # engines of the bench are processes that import this file
    main()
