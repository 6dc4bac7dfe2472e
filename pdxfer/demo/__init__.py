"""A real model's KV cache crosses from one process to another, and the tokens say if it arrived."""
