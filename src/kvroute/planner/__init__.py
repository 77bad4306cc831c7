"""Offline searches: what to build and how to divide it, judged by formula before anything is simulated or bought."""
