"""Thin adapters to serving engines. Each module imports its engine when it is asked to register, not before."""
