"""Analyses of a problem that generators share: where leaves lie, rows and columns that values share, composites as steps."""
