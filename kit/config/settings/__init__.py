"""The settings of a recipe by subject: one class for each, of which ``kit.config.recipe.Recipe`` inherits.

A function that needs some settings takes the class that declares them. A recipe is one of each.

Each setting is declared with ``_option``, so that it may have another value at the next start of a run, or with
``_identity``: with another value the steps would compute something else, so it is another run. ``kit.run.identity``
compares the settings of the second kind.
"""
