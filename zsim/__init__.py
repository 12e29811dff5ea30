"""zsim: a discrete-event simulator of ZeRO and FSDP training."""

__version__ = "0.1.0"
