"""Every setting of VeriCache: schema, flags, files."""
