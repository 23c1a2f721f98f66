"""Parameters in folders of safetensors files, like Hugging Face models: tables of names, reading, writing."""
