"""Cases that are not drawn: one group, one arrangement a side, sizes as given."""

import itertools

from pdxfer.layout.builders.state import StateTensor
from tests.support.cell_oracle import check_case
from tests.support.layout_cases import Case, GroupModel, Side

WIDTHS = {"mxfp8": (32, 64), "mxfp8_tiles": (32, 64), "vectorized_5d": (16, 8), "mla": (32, 16),
          "dsa": (128, 64)}  # fmt: skip


def group_of(family, **changes):
    values = {
        "name": "full",
        "family": family,
        "dtype": "float8_e4m3fn" if family.startswith("mxfp8") else "bfloat16",
        "layers": (0, 3),
        "heads": 1 if family in ("mla", "dsa") else 4,
        "widths": WIDTHS.get(family, (8, 16)),
        "draft_layers": (40, 41) if family == "draft" else (),
        "first": 0,
        "end": 41,
    }
    if family == "state":
        values |= {"name": "state", "end": 2}
        values["tensors"] = (
            StateTensor("conv.0", (16, 3), "bfloat16", 0, (4, 4, 8)),
            StateTensor("conv.1", (3, 16), "float16", 1, (8, 8), 2),
            StateTensor("temporal", (4, 2, 4), "float32", 0),
            StateTensor("ssm", (5, 2), "float32", None),
        )
    return GroupModel(**{**values, **changes})


def side_of(group, arrangement, page_size, tp_size=1, stages=1, first_token=0, cp_size=1):
    layers = group.layers
    cuts = [len(layers) * n // stages for n in range(stages + 1)]
    return Side(
        tp_size=tp_size,
        pp_size=stages,
        cp_size=cp_size,
        arrangements={group.name: arrangement},
        page_sizes={group.name: page_size},
        first_tokens={group.name: first_token},
        pages={group.name: -(-group.end // page_size) + 4},
        reserved=1,
        stages=[layers[a:b] for a, b in itertools.pairwise(cuts)],
    )


def check(group, source, destination, receiver=0, **changes):
    values = {"layers": None, "batch_bytes": 4096, "own_pages_only": False, "seed": 7}
    check_case(Case({group.name: group}, source, destination, receiver, **{**values, **changes}))
