"""Judging images: the digits classifier and its features."""
