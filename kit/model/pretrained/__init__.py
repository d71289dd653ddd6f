"""A pretrained model on disk or on the hub: its folder, files, tokenizer, class and head."""
