"""Images and audio as inputs of a model: placeholders in the text, inputs of the encoders, positions."""
