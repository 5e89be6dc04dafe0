"""What a loaded model is worth: its answers to tasks of lm-eval, and its speed."""
