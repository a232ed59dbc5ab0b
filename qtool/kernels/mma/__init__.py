"""GEMMs by mma.sync: Ampere, Ada, and 16-bit activations up to Hopper."""
