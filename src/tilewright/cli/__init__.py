"""The command line, one verb or one concern a file."""

from tilewright.cli.verbs import main as main
