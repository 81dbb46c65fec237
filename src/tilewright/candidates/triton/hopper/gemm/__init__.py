"""Matrix products for Hopper."""
