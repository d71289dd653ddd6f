"""Programs that look at a machine, a plan, data or a run. They import the core; the core imports none of them."""
