"""One run in several processes: collectives over torch.distributed, and their supervision."""
