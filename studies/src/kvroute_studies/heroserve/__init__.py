"""HeroServe's evaluation."""
