"""How a run ends: exit statuses, signals, ranks that die or hang, memory that runs out."""
