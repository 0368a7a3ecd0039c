"""Judging images: spaces of features, and measures in them."""
