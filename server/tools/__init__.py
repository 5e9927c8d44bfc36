"""Tool calls: how models write them, grammars that make them write valid ones, and parsers that read them."""
