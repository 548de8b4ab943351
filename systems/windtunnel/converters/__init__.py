"""Fitted operators as modules, a file a family. Each file's CONVERTERS maps (library, class) to a function."""
