"""The one-program lowering of a pipeline: its schedule in slots, its stages on lanes, unrolled over ``pp``."""
