"""The Hugging Face hub: what it answers, and uploads to it."""
