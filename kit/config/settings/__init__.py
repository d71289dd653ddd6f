"""The settings of a recipe by subject. A function that needs some takes the part that has them."""
