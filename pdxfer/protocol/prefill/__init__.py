"""The prefill machine: matches sends with receives, and turns chunks into writes."""
