"""Times, the work they are compared with, and results beside a reference."""
