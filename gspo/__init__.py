"""Reinforcement learning of language models with verifiable rewards, around GSPO (arXiv:2507.18071)."""

__version__ = "0.1.0"
