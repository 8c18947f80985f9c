"""Imports df11 right before transformers or diffusers make their lists of quantizers.

Python runs this at its start, by `_df11_start.pth`: so compressed models load without
`import df11`. It imports nothing by itself, and costs some microseconds; `python -S` and other
starts without site-packages leave it out.

Two modules import such a list, and have functions that df11 wraps: so it must be there before they
run.
"""

import sys

_NAMES = (
    "transformers.modeling_utils",
    "transformers.quantizers.auto",
    "diffusers.loaders.single_file_model",
    "diffusers.quantizers.auto",
)


class _Finder:
    """Finds nothing; `df11` has finders of its own for these names."""

    def find_spec(self, name, path=None, target=None):
        if name not in _NAMES:
            return None
        sys.meta_path.remove(self)
        try:
            import df11  # noqa: F401
        except ImportError as error:  # what was to be imported needs no df11
            import warnings

            warnings.warn(f"df11 could not be imported: {error}", RuntimeWarning, stacklevel=2)
        from importlib.util import find_spec

        return find_spec(name)


sys.meta_path.insert(0, _Finder())
