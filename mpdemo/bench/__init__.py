"""The speed figures of the README."""
