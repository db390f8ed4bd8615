"""`make demo`: one server, two workers, one shared cache, a real model, and checks of it all."""
