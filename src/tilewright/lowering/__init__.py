"""What a generator reads off a problem: where leaves lie, rows and columns that values share, composites as steps."""
