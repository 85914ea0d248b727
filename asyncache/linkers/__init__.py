"""Links a device to what is outside it: the transport contract, a standard form."""

from asyncache.linkers._abc import Landed, Linker, Outcome
from asyncache.linkers._mooncake import MooncakeLinker
from asyncache.linkers._mooncake_client import MooncakeSetup
from asyncache.linkers._store_linker import StoreLinker

__all__ = [
    "Landed",
    "Linker",
    "MooncakeLinker",
    "MooncakeSetup",
    "Outcome",
    "StoreLinker",
]
