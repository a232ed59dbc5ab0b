"""GEMMs by mma.sync: Ampere to Blackwell."""
