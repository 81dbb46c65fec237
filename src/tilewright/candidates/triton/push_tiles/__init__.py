"""A product of many rows whose epilogue stores its tiles into the memory of the ranks that add them up."""
