"""Config models of scenes, and functions that build MuJoCo models of scenes from configs."""
