"""KV cache pools with SGLang's constructor and method names; torch, layout and memory only."""
