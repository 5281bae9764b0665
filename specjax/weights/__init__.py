"""Models that ship with the package, as data: folders in Hugging Face layout, each with its card."""
