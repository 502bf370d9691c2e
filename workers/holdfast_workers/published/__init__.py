"""Published models in Hugging Face's format: their configuration, files and weights."""
