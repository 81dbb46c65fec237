"""`python -m tilewright`: the command line."""

from tilewright.cli.verbs import main

main()
