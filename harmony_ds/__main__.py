"""`python -m harmony_ds SCRIPT ...`: run a DeepSpeed or Trainer script as it is, with harmony_ds."""

import sys

from harmony_ds.errors import UsageError
from harmony_ds.integrations.script import check_command, run_script

if __name__ == "__main__":
    try:
        check_command(sys.argv[1:])
    except UsageError as error:
        sys.exit(f"error: {error}")
    run_script(sys.argv[1:])
