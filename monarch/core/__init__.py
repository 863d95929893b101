"""Who is called what, what reaches whom, and the loop of an actor. Knows bytes, and no endpoints or meshes."""
