"""Inner drafters: they propose tokens that a row runs behind its last one."""
