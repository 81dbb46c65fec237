"""A product of few rows whose epilogue stores partial sums into the memory of the ranks that add them up."""
