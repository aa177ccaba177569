"""Model families, pretrained models and their prompts: measurements and pages of finished runs."""
