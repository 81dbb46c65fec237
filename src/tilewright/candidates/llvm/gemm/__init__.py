"""Matrix products for CPUs, one loop nest around the chip's dot instruction."""
