"""Load generation: seeded workloads, run against any OpenAI-compatible URL or an engine in this process. No jax.

workloads  what is asked      load     who asks when (closed loop, open loop)
http       a URL as target    in_process   an LLM as target
report     records to figures, JSON and a table
"""
