"""Rows of handwritten digits and digits dialled, to be read, heard, compared and drawn."""
