"""Gathers the source pages of the documentation site: docs/, pages of other folders, and pages made from the code."""
