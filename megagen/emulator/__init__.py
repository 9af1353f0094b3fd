"""Runs the PTX of kernels on the CPU, with their asynchrony, and finds what would hang, race or read garbage."""

from megagen.emulator.machine import Buffer, Machine, Module, Report, supported_forms

__all__ = ["Buffer", "Machine", "Module", "Report", "supported_forms"]
