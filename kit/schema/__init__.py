"""How a setting, and a rule between settings, is declared."""
