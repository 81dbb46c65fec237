"""Data that the Ada GPUs share."""

ADA = "NVIDIA Ada GPU Architecture whitepaper v2.02, appendix A (GeForce RTX 4090): dense rates, 128 SMs at 2520 MHz"
SHARED_BYTES = 99 << 10  # NVIDIA Ada GPU Architecture Tuning Guide 13.0, 1.4.1.1 and 1.4.2.2
TUNING = "NVIDIA Ada GPU Architecture Tuning Guide 13.0, 1.4.1.1: 64K registers an SM, 99 KB of shared memory a block"
