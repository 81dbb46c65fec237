"""The graph: nodes, operations, rules' machinery, text, verification, and the oracle."""
