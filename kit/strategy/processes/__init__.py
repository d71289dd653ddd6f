"""The processes of a run: how they find each other, meet, and agree."""
