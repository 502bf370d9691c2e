"""Model families as plain single-device modules; they know nothing of meshes."""
