"""Cases and timing: what is measured, and how."""
