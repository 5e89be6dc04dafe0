"""The bundled demo: a little mixture of experts, prompts for it, and the script that trained it.

Installed as `moedge.demo` so that `moedge demo` works from a wheel; nothing imports it.
"""
