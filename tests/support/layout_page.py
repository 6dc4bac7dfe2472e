"""docs/layouts.md: every layout of the catalog in a line; `make generated` writes it."""

from pdxfer.cli.plan.keys import keys_of
from pdxfer.layout.builders.catalog import catalog

HEAD = """\
# Layouts

Every layout by its name, as `pdxfer plan` takes it for `layout`, `pdxfer.layout.arranged` for keys and values, and `pdxfer.layout.mla` for latent
attention. Made from `pdxfer/layout/builders` by `make generated`; do not edit.

An order names axes, the outermost first; the content of a cell is always innermost and is not written. Axes before the bar give a region of its own to
every index, axes behind it lie inside of a region.

| axis | what lies along it |
| --- | --- |
| T | the tensors of a layer: K and V, latent rows, block scales, keys of an index; without T they lie side by side in the content of a cell |
| L | the layers of the rank |
| B | pages (blocks) |
| N | the rows of a page, one for each token; a tile has one |
| H | the heads of a row; without H there is one |
| G | groups of heads |
| + | whatever follows is padded to a multiple of 32 bytes |

Where it is: `device`, a pool that kernels read; `envelope`, such a pool whose pages lie together and move whole (`relayout="never"` unless told
otherwise); `host`, a host pool as SGLang has them, in which every page travels and layers lie in ascending order; `blocks`, the one allocation of vLLM, in
which K and V of a head and token lie together. Except in host pools page 0 is reserved unless `reserved_pages` says otherwise. Layouts of recurrent state
are made in Python only.

| layout | where | order of axes | of latent attention | keys of its own | what it is |
| --- | --- | --- | --- | --- | --- |
"""  # noqa: E501
_OF_ALL = frozenset(keys_of("token_major", latent=False).known) | frozenset(
    keys_of("token_major", latent=True).known
)


def table():
    """docs/layouts.md."""
    return HEAD + "".join(f"{line(entry)}\n" for entry in catalog().values())


def line(entry):
    """The line of one layout."""
    row = entry.row
    orders = ("", "", "") if row is None else (row.home, _code(row.order), _code(row.latent))
    cells = (_code(entry.name), *orders, ", ".join(map(_code, _own_keys(entry))), entry.says)
    return f"| {' | '.join(cells)} |"


def _own_keys(entry):
    known = []
    for made, latent in ((entry.heads, False), (entry.latent, True)):
        if made is not None:
            known += keys_of(entry.name, latent=latent).known
    return [key for key in dict.fromkeys(known) if key not in _OF_ALL]


def _code(text):
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`" if text else ""
