"""The admin server: state, dashboard, reloads."""
