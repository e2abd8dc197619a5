"""Read and write the files of ecrl: atomically, as safetensors, and with checksums."""
