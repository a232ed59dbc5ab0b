"""qtool: an offline quantization toolkit and checkpoint converter for large language models."""

__version__ = "0.1.0"
