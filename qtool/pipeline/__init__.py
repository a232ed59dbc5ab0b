"""The run: plan, quantize block by block, resume, verify, inspect."""
