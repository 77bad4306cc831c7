"""Tables, figures and pages of plans."""
