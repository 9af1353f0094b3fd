"""What a plan, a source or a compiled kernel is made of: resources, shared-memory map, instruction mix."""
