"""Requests that wait before they are placed."""
