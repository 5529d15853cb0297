"""The edits that sdsage makes to the pinned stable-diffusion.cpp, as a table.

An edit is (file, where, anchor, text): `text` is put before ("<"), after (">") or in place of ("=") the anchor, which
must occur exactly once in the pinned file (line ends normalised). A group is one topic, with its reason, its guard (the
test that fails without it) and its drop check (how to see that upstream does it by itself).
"""

from edits.attention import FLASH, SAGE
from edits.files import FILES
from edits.guidance import GUIDANCE
from edits.host import DEVICE, LOG
from edits.job import DECODE, GUARD, RANDOM, SEAM, SHIFT
from edits.levers import EMBEDDING, LEVERS
from edits.offload import OFFLOAD
from edits.programs import SD_CLI, SD_SERVER
from edits.sizes import SIZES
from edits.system import SYSTEM
from edits.table import Edit, Group
from edits.windows import WINDOWS

__all__ = ["GROUPS", "Edit", "Group"]

# in the order in which they are applied
GROUPS = (
    SIZES,
    SEAM,
    GUARD,
    FILES,
    LOG,
    DEVICE,
    SHIFT,
    RANDOM,
    SD_CLI,
    SD_SERVER,
    SAGE,
    FLASH,
    LEVERS,
    EMBEDDING,
    GUIDANCE,
    OFFLOAD,
    DECODE,
    SYSTEM,
    WINDOWS,
)
