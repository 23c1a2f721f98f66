"""Parameters in folders of safetensors files, as Hugging Face models have them: tables of names, reading, writing."""
