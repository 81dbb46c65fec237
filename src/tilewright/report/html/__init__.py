"""A report as one sealed page, its roofline, and the drawing of a graph."""
