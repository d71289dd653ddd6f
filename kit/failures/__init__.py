"""How a run ends: exit statuses, signals, ranks that died or hang, out of memory."""
