"""Offline searches by formula: which hardware to use and how to divide it, before simulating or buying anything."""
