"""What tests and tables of real weights share: texts, cases, what moedge finds, what it ought to find."""
