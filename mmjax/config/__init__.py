"""Configuration: gin text and flags become one frozen, checked `Recipe`."""

from mmjax.config.load import (
    config_of_values,
    config_that_fits,
    default_run_dir,
    load_config,
    load_run_config,
    require_devices,
)
from mmjax.config.operative import changed_values, differences, operative_config
from mmjax.config.scopes import scopes_of

__all__ = [
    "changed_values",
    "config_of_values",
    "config_that_fits",
    "default_run_dir",
    "differences",
    "load_config",
    "load_run_config",
    "operative_config",
    "require_devices",
    "scopes_of",
]
