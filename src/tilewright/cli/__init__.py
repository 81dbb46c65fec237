"""The command line, one verb or one concern a file."""
