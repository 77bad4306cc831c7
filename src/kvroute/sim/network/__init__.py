"""Bytes on links in virtual time."""
