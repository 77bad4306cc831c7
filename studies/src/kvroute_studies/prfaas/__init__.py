"""PrfaaS's evaluation."""
