"""Small kernels that run on a real GPU and in the emulator, and recorded outputs to compare the two by.

``cases`` defines what a case is; one module per subject builds cases; ``records`` reads and writes outputs.
``scripts/record_hardware.py`` runs all cases on a GPU.
"""
