"""Action, observation, reward, event and camera terms of MuJoCo tasks."""
