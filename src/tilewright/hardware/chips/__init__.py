"""One data file per chip family; each defines `CHIP`."""
