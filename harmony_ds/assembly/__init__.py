"""Everything that an engine needs, made from its arguments and checked before training begins."""
