"""Code that several tests share: small environments, configs, records, pages and processes."""
