"""Flax transformers: cache in, cache out. Shipped as ``specjax.models``."""
