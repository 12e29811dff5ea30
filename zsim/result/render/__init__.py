"""A Result for people and for their tools: one file per format. Heavy libraries load inside functions."""
