"""A report as one self-contained page, its roofline, and the drawing of a graph."""
