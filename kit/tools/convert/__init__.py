"""Converts the configuration files of other kits to recipes of this one."""
