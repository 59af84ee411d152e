"""What tests of several rooms share: small problems, plans of the ledger, NumPy loops, paths."""
