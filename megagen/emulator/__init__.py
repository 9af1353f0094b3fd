"""Runs the PTX of kernels on the CPU, with their asynchrony; finds what would hang, race or read garbage."""

from megagen.emulator.machine import Buffer, Machine, Module, Report, Wait, supported_forms

__all__ = ["Buffer", "Machine", "Module", "Report", "Wait", "supported_forms"]
