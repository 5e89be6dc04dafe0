"""How fast this machine computes: rates of weight formats, and what a pass costs besides its products."""
