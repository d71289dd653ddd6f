"""Bytes to rows: files, archives, tables and hub ids. Every row keeps its origin, ``file:line``."""
