"""Which tokens, in which order: text -> documents -> ids -> shards -> batches. Knows no model and no torch."""
