"""The Hugging Face hub: its errors, and uploads to it."""
