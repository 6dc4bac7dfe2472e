"""How fast the lanes move bytes, beside the plainest means there are, in the same run."""
