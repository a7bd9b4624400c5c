"""Drafters: what proposes tokens for the target to check. A new one is a new file behind the same protocol.

A drafter sees the sequence so far and nothing of the target; whatever it proposes, only the target decides what is said.
"""

from .adaptive import AdaptiveDrafter
from .hybrid import HybridDrafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .off import NoDrafter
from .protocol import Drafter

__all__ = ["AdaptiveDrafter", "Drafter", "HybridDrafter", "LookupDrafter", "ModelDrafter", "NoDrafter"]
