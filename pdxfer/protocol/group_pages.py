"""Pages of one group as messages carry them: ids, and the tokens that have none. Pure."""

from __future__ import annotations

import numpy as np

from pdxfer.errors import RemoteProtocolError
from pdxfer.layout import Pages
from pdxfer.limits import PAGES_PER_MESSAGE_MAX
from pdxfer.wire.messages import GroupPages
from pdxfer.wire.pages import pack_ids, unpack_ids


def pack_group(pages: Pages) -> GroupPages:
    """Pages of one group as they travel.

    Raises:  as `pack_ids`.
    """
    encoding, ids = pack_ids(pages.ids)
    skipped = np.array(pages.skipped, dtype="<i8").tobytes()
    return GroupPages(first_token=pages.first_token, encoding=encoding, ids=ids, skipped=skipped)


def unpack_group(group: GroupPages) -> Pages:
    """Pages of one group as they came.

    Raises:  RemoteProtocolError: malformed ids or skipped tokens, or too many; ConfigError: ranges
             of skipped tokens that are empty, overlap, or begin before the first token.
    """
    if len(group.skipped) % 16 or len(group.skipped) > 16 * PAGES_PER_MESSAGE_MAX:
        raise RemoteProtocolError(
            f"field skipped: {len(group.skipped)} bytes are no pairs of 64-bit tokens, or more "
            f"than {PAGES_PER_MESSAGE_MAX} of them"
        )
    pairs = np.frombuffer(group.skipped, dtype="<i8").reshape(-1, 2).tolist()
    skipped = tuple((first, end) for first, end in pairs)
    return Pages(unpack_ids(group.encoding, group.ids), group.first_token, skipped)
