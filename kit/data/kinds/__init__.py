"""What the rows of a data set hold: a module for each kind."""
