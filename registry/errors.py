"""What the registry can refuse or fail.

RegistryError
├── NotFound               no such adapter, version, model or blob (also: it is another tenant's)
├── Conflict               a taken or reserved name; a request id used for something else
│   └── WrongBase          an adapter of another base than the one served
├── InvalidName            a name or digest outside the allowed form; also a ValueError
├── RegistryUnavailable    Redis does not answer, or cannot promise durability; try again
├── StorageFull            no room on the disk or in Redis
└── EmbeddedServerError    the embedded server cannot run (folder in use, newer data, no binary)
"""

from __future__ import annotations


class RegistryError(Exception):
    """Base of all registry failures."""


class NotFound(RegistryError):
    """The thing named does not exist for this tenant."""


class Conflict(RegistryError):
    """The request contradicts what is already there."""


class WrongBase(Conflict):
    """The adapter is there, but it was uploaded for another base than the one served."""


class InvalidName(RegistryError, ValueError):
    """A name breaks the rule stated in the message."""


class RegistryUnavailable(RegistryError):
    """The registry cannot be changed now. Reads go on from the snapshot.

    A mutation that ends so may or may not have been done: repeat it with the same request id.
    """


class StorageFull(RegistryError):
    """There is no room for more; nothing was published."""


class EmbeddedServerError(RegistryError):
    """The embedded server cannot be started on its data folder."""
