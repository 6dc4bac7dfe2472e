"""Modules that SGLang imports and its pools never call: names that raise when they are used.

`sgl_kernel` and `torchvision` have no build for a CPU-only torch; the others only read quantised
weights. Nothing of the pools is replaced.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import warnings

ABSENT = ("compressed_tensors", "gguf", "sentencepiece", "sgl_kernel", "torchvision")


class Name:
    """What an absent module would have given."""

    def __init__(self, name):
        self._name = name

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self._name} was called, but only its name is there")

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Name(f"{self._name}.{attribute}")


class Absent(types.ModuleType):
    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Name(f"{self.__name__}.{attribute}")


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in line: a module that is installed is found before."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return Absent(spec.name)

    def exec_module(self, module):
        pass


def import_pools():
    """SGLang's `memory_pool`; to be called before anything else of SGLang is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # First, so that transformers looks for the real torchvision.
        from transformers import AutoProcessor  # noqa: F401
        from transformers.models.auto import configuration_auto

        # Newer transformers have some models that SGLang registers itself.
        mapping = configuration_auto._LazyConfigMapping
        register = mapping.register
        mapping.register = lambda self, key, value, exist_ok=False: register(
            self, key, value, exist_ok=True
        )
        sys.meta_path.append(Finder())
        from sglang.srt.mem_cache import memory_pool

    # Its own store kernel is in sgl_kernel; without it the pools write with torch.
    memory_pool._cpu_has_amx_support = False
    parallel = memory_pool.get_parallel()
    if hasattr(parallel, "override_permanently"):
        parallel.override_permanently(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0)
    return memory_pool
