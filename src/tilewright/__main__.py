"""`python -m tilewright`, and the command `tilewright`: the command line, and then the end of the process."""

import os
import sys

INTERRUPTED = 130

try:
    from tilewright.cli.errors import leave
    from tilewright.cli.verbs import main
except KeyboardInterrupt:  # nothing runs yet that has to be ended
    os._exit(INTERRUPTED)


def command() -> None:
    """Run the command line, and end the process."""
    try:
        try:
            main()
        except SystemExit as end:
            if isinstance(end.code, int | None):
                leave(end.code or 0)
            raise
        leave(0)
    except KeyboardInterrupt:  # outside of a verb
        os._exit(INTERRUPTED)
    sys.exit(0)


if __name__ == "__main__":
    command()
