"""The demo: one long document, several questions, three ways of serving."""
