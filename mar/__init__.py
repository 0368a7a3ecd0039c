"""The continuous models: MAR, its diffusion head and its autoencoder, and how their weights are loaded."""
