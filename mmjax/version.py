"""The version of mmjax, for modules below `mmjax` itself, which imports all of them."""

__version__ = "0.1.0"
