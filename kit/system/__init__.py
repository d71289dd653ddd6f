"""What every other package stands on: errors, untrusted text, credentials, files, the lock, the cache, the console."""
