"""What several schemes compute alike: grids, levels, activations, integer products."""
