"""From bytes to micro-batches: read rows, tokenise them to samples, cache these, deal them to steps and ranks."""
