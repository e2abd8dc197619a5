"""The notebooks, the packages that each needs, and the pictures and videos that each shows."""

from support.paths import ROOT

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
NEEDED = {
    "00_quickstart": ("matplotlib", "pandas", "imageio_ffmpeg"),
    "01_kernels_by_hand": ("matplotlib",),
    "02_add_an_algorithm": ("matplotlib",),
    "03_embed_a_kernel": ("matplotlib", "stable_baselines3"),
    "04_many_seeds": ("matplotlib", "pandas"),
    "05_push_cube": ("matplotlib", "mujoco", "imageio_ffmpeg"),
    "06_off_policy": ("matplotlib",),
    "07_memory_and_images": ("matplotlib",),
    "08_vla": ("matplotlib", "mujoco", "imageio_ffmpeg"),
}
VIDEOS = {"00_quickstart": 1, "05_push_cube": 1, "08_vla": 2}
PICTURES = {"00": 1, "01": 10, "02": 1, "03": 3, "04": 2, "05": 1, "06": 1, "07": 3, "08": 2}


def cells(notebook):
    """Cells of code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
