"""Basics for all packages: errors, untrusted text, credentials, files, the lock, the cache, the console."""
