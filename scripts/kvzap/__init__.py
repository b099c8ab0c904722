"""Training of KVzap: texts, what a repetition reads of them, and the regressors."""
