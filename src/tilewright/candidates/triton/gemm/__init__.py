"""Matrix products for GPUs in general."""
