"""Where the visual tokens of model families stand in their prompts: grids of images, tiles and frames."""
