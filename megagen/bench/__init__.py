"""Measuring: timing, ceilings, what megagen is compared with, and the processes in which that happens."""
