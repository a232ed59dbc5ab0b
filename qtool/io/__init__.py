"""Files in and out: safetensors, sources, output directories; reading ahead, writing behind."""
