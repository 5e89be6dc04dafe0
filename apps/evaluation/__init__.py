"""lm-eval on a model of moedge: its tasks, and the model as it sees one."""
