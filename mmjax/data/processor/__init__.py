"""The processor of a folder of Hugging Face's: special tokens, chat template and image rules."""
